"""What `paceline eval` prints in a terminal."""

from __future__ import annotations

from typing import Any

Figure = dict[str, float | None]


def print_facts(facts: dict[str, Any]) -> None:
    """Print all figures with their intervals, the reference's beside the model's."""
    print(facts["model"])
    if "reference" in facts:
        print(f"against {facts['reference']}")
    if "text" in facts:
        _print_text(facts["text"])
    for role, parts in facts.get("generation", {}).items():
        if "reference" in facts:
            print(f"\n{role}: {facts[role]}")
        _print_parts(parts)
    if facts["resumed_items"]:
        print(f"\n{facts['resumed_items']} items were known from a run before.")


def _print_text(text: dict[str, Any]) -> None:
    print(
        f"\n{text['file']}: {text['num_scored']} tokens scored, windows of {text['context']} "
        f"that move by {text['stride']}"
    )
    rows = [("perplexity", "perplexity", 4), ("of the reference", "reference_perplexity", 4),
            ("ratio", "perplexity_ratio", 5), ("KL, mean (nats)", "kl_mean", 6),
            ("KL, p99", "kl_p99", 6)]  # fmt: skip
    for label, name, digits in rows:
        if name in text:
            print(f"  {label:24}{shown(text[name], digits)}")
    if "kl_max" in text:
        print(f"  {'KL, largest':24}{text['kl_max']:.6f}")
    for label, name in (("same best token", "top1"), ("best five in common", "top5")):
        if name in text:
            print(f"  {label:24}{percent(text[name])}")


def _print_parts(parts: dict[str, Any]) -> None:
    for name, task in parts.get("tasks", {}).items():
        print(f"\n{name}")
        if "choices" in task:
            choices = task["choices"]
            print(f"  choices, {choices['num_items']:<14} {percent(choices['accuracy'])}")
            print(f"  {'… normalised by bytes':24}{percent(choices['accuracy_normalised'])}")
        if "numbers" in task:
            numbers = task["numbers"]
            print(f"  numbers, {numbers['num_items']:<14} {percent(numbers['accuracy'])}")
            _print_loops(numbers["loops"])
    if "prompts" in parts:
        print("\nprompts")
        _print_loops(parts["prompts"]["loops"])
    if "humaneval" in parts:
        found = parts["humaneval"]
        print(f"\nHumanEval\n  pass@1, {found['num_items']:<15} {percent(found['pass_at_1'])}")
        failures = ", ".join(f"{count} {why}" for why, count in found["failures"].items())
        print(f"  {'failures':24}{failures or 'none'}")
        _print_loops(found["loops"])
    if "needles" in parts:
        found = parts["needles"]
        print(f"\nneedles\n  {'found':24}{percent(found['share'])}")
        for length in dict.fromkeys(cell["length"] for cell in found["cells"]):
            cells = [cell for cell in found["cells"] if cell["length"] == length]
            marks = " ".join(
                f"{cell['depth']}%:{'yes' if cell['found'] else 'no'}" for cell in cells
            )
            print(f"  {f'{length} tokens':24}{marks}")


def _print_loops(loops: dict[str, Any]) -> None:
    count, total, cut = loops["num_loops"], loops["num_answers"], loops["num_cut"]
    print(f"  {'answers in a loop':24}{percent(loops['share'])}: {count} of {total}, {cut} cut")


def shown(figure: Figure, digits: int) -> str:
    """Return value and interval: `12.3456 (12.1000 to 12.6000)`."""
    return _interval(figure, lambda value: f"{value:.{digits}f}")


def percent(figure: Figure) -> str:
    """Return a share in percent with its interval."""
    return _interval(figure, lambda value: f"{100 * value:.2f} %")


def _interval(figure: Figure, form: Any) -> str:
    value, low, high = (figure[name] for name in ("value", "low", "high"))
    if low is None or high is None:
        return f"{form(value)} (too few to say how sure)"
    return f"{form(value)} ({form(low)} to {form(high)})"
