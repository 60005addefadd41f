"""The prompts of `paceline bench spec`: texts that repeat their prompt much, little, or not."""

from __future__ import annotations

_MODULE = '''\
import math


class Shape:
    """A named figure with a width and a height."""

    def __init__(self, name, width, height):
        self.name = name
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)

    def describe(self):
        print(f"{self.name}: area {self.area()}, perimeter {self.perimeter()}")


class Circle(Shape):
    def __init__(self, radius):
        super().__init__("circle", 2 * radius, 2 * radius)
        self.radius = radius

    def area(self):
        return math.pi * self.radius ** 2
'''

_REPORT = (
    "The harbour office published its yearly report on Monday. Ship calls rose from 1,204 to "
    '1,377, and the new crane handled a third of all containers. "We expected the crane to pay for '
    'itself in six years; it will take four," said the harbour master, Ines Morel. Waiting times '
    'fell from nine hours to seven. The fishing boats gained less: "Nobody asked us where the quay '
    'should be," said Tomas Berg, who speaks for forty crews. The town council will vote on a '
    "second crane in spring. Its cost is put at 11 million, of which the region would pay half. A "
    "group of residents fears noise at night and has collected 2,300 names. The office answers "
    "that the second crane is electric and that night work would end at eleven."
)

_FUNCTION = '''\
def has_close_elements(numbers: list[float], threshold: float) -> bool:
    """Return whether any two numbers are closer to each other than threshold."""
'''


def _about_module(task: str) -> str:
    return f"{task} and print the whole file:\n\n```python\n{_MODULE}```"


PROMPTS: dict[str, tuple[str, ...]] = {
    "edit": (
        _about_module("Rename the method `area` to `surface` everywhere"),
        _about_module("Add a type hint to every parameter"),
    ),
    "echo": (f"Repeat this text word for word, and nothing else:\n\n{_REPORT}",),
    "quotes": (f"List what each person or group in this report says, quoting them:\n\n{_REPORT}",),
    "code": (
        f"Complete this function.\n\n```python\n{_FUNCTION}```",
        "Write a Python class for a bank account with deposit, withdraw and transfer, and a unit "
        "test for each method.",
    ),
    "chat": (
        "I have two days in Lisbon in November. What should I see, and how do I get around?",
        "Explain to a twelve-year-old why the sky is blue.",
    ),
    "prose": (
        "Write the opening of a novel about a lighthouse keeper who receives a letter.",
        "Write a short essay on why people collect things.",
    ),
}
