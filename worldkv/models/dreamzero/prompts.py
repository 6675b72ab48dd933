"""The negative prompt of all DreamZero models: part of the model's input to the byte. Embodiments bring their own."""

NEGATIVE_PROMPT = (
    "Vibrant colors, overexposed, static, blurry details, text, subtitles, style, artwork, painting, image, still, "
    "grayscale, dull, worst quality, low quality, JPEG artifacts, ugly, mutilated, extra fingers, bad hands, bad face, "
    "deformed, disfigured, mutated limbs, fused fingers, stagnant image, cluttered background, three legs, many people "
    "in the background, walking backwards."
)
