// What the greeting says of the robot that is served: cameras, numbers with their units, times.

const UNITS = { radians: "rad", metres: "m", degrees: "°" };

export const camerasOf = ({ about }) => about?.cameras ?? [];
// Of videos: a block.
export const chunkSeconds = ({ about }) => about?.chunk_s ?? ((about?.frames_per_block ?? 0) / (about?.frames_per_second ?? 1));
export const rateOf = ({ about }) => about?.rate_hz ?? 0;

// The unit, or what the ends of its range mean, and the range if its file states one.
export function axisOf({ about }, key) {
  const { meaning = "", range = null } = about?.axes?.[key] ?? {};
  return { unit: UNITS[meaning] ?? meaning, range };
}

// One for each number of an action, in their order.
export function actionNumbers(hello) {
  return (hello.about?.actions ?? []).flatMap(({ key, dim }) => Array.from({ length: dim }, (_, number) => (
    { name: dim > 1 ? `${key} ${number + 1}` : key, ...axisOf(hello, key) }
  )));
}
