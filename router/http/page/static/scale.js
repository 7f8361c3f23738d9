// Where a scale ends. One outlier among many values does not make slivers of the others: it is cut, and marked.

const SHARE = 0.75;
const ROOM = 3;

/** The largest value, but at most three times the value that three quarters of them stay under. */
export function scaleEnd(values) {
  if (!values.length) return 1;
  const ordered = [...values].sort((one, other) => one - other);
  const usual = ordered[Math.floor((ordered.length - 1) * SHARE)];
  const most = ordered.at(-1);
  return Math.max(usual > 0 ? Math.min(most, ROOM * usual) : most, Number.MIN_VALUE);
}
