"""The one home for measuring: what `worldkv bench` and `plan` use; `sessions`, `console`, `loading` run alone."""
