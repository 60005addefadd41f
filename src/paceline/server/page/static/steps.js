// What a timeline's steps say of each token: when it came, and what else its step computed.

// Tokens of others in a step, as [kind, count].
export function othersIn(step) {
  const counts = { ...step.step_tokens };
  const known = step.num_tokens - step.num_drafted;
  counts[step.kind] = Math.max((counts[step.kind] || 0) - known, 0);
  counts.verify = Math.max((counts.verify || 0) - step.num_drafted, 0);
  return Object.entries(counts).filter(([, number]) => number > 0);
}

// For each token of the choice the step that gave it, and the gap to the token before. Of several
// tokens of one step all but the last were drafted, and came without a wait of their own.
export function emissions(steps) {
  const given = [];
  let last_ms = null;
  for (const step of steps) {
    const others = othersIn(step);
    const hasPrompts = others.some(([kind]) => kind !== "decode");
    for (let left = step.new_tokens; left > 0; left--) {
      const gap_ms = last_ms === null ? null : step.end_ms - last_ms;
      given.push({ ...step, others, hasPrompts, gap_ms, isDrafted: left > 1 });
      last_ms = step.end_ms;
    }
  }
  return given;
}

export function median(values) {
  if (!values.length) return null;
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}
