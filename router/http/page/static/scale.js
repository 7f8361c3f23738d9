// End of a scale. A single outlier may exceed it, so that the other values stay readable.

const SHARE = 0.75;
const ROOM = 3;

/** Return the largest value, but at most three times the upper quartile. */
export function scaleEnd(values) {
  if (!values.length) return 1;
  const ordered = [...values].sort((one, other) => one - other);
  const usual = ordered[Math.floor((ordered.length - 1) * SHARE)];
  const most = ordered.at(-1);
  return Math.max(usual > 0 ? Math.min(most, ROOM * usual) : most, Number.MIN_VALUE);
}
