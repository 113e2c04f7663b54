"""A world of quantities, and statements about them: what problems of reasoning are made of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Quantity = tuple[str, str]  # place, thing

LARGEST = 300  # value of a quantity
NAMES = """Maple Willow Alder Aspen Birch Hazel Juniper Linden Poplar Rowan Sycamore Amber
Copper Silver Golden Crystal Marble Granite Pebble Sunny Misty Windy Frosty Breezy Quiet Merry
Happy Northern Southern Eastern Western Upper Lower Inner Outer Lion Falcon Heron Raven Robin
Swallow Otter Badger Clover Daisy Lilac Poppy Thistle Violet Ivy Fern Castle Tower Abbey Mill
Bridge Ferry Garden Orchard Meadow Harvest Autumn Winter Summer Spring Morning Evening River Brook
Lake Ocean Summit Ridge Canyon Prairie Desert Forest"""
WORLDS = {  # kinds of places, and what they have
    "Park Bay Valley Reserve Island Marsh Hill Grove": """otters lynxes foxes owls bears deer geese
    turtles badgers beavers cranes ducks eagles ferrets frogs goats hares hedgehogs herons horses
    lizards moles monkeys newts parrots penguins rabbits seals sheep snakes squirrels storks swans
    tigers wolves zebras""",
    "School College Academy Library Museum Theatre Institute Studio": """pianos violins globes
    desks chairs lamps clocks maps paintings telescopes microscopes computers printers notebooks
    pencils rulers easels drums flutes trumpets guitars benches shelves statues mirrors carpets
    curtains cameras projectors blackboards trophies puppets costumes robots kites balls""",
    "Market Bakery Farm Harbor Inn Cafe Store Kitchen": """apples pears plums melons lemons oranges
    cabbages carrots onions potatoes pumpkins radishes loaves pies cakes muffins cookies pretzels
    eggs cheeses jars bottles barrels baskets crates sacks kettles teapots cups plates spoons forks
    knives bowls candles brooms""",
}


@dataclass(frozen=True)
class Step:
    """A quantity, the statement that defines it, and the sum that gives it ("" if none does)."""

    quantity: Quantity
    value: int
    statement: str
    sum: str = ""

    @property
    def told(self) -> str:
        """What a solution says about it."""
        place, thing = self.quantity
        return f"{place} has {self.sum}{self.value} {thing}."

    @property
    def question(self) -> str:
        place, thing = self.quantity
        return f"How many {thing} does {place} have?"


class Story:
    """Hands out quantities, each once, and makes statements about them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._things = {
            f"{name} {kind}": things.split()
            for kinds, things in WORLDS.items()
            for kind in kinds.split()
            for name in NAMES.split()
        }
        self._places = list(self._things)
        self._taken: set[Quantity] = set()
        self._others: list[Step] = []

    @property
    def num_quantities(self) -> int:
        return sum(len(self._things[place]) for place in self._places)

    def leave(self, steps: Sequence[Step]) -> None:
        """Never speaks of the steps' places again."""
        left = {step.quantity[0] for step in steps}
        self._places = [place for place in self._places if place not in left]
        self._others = []

    def chain(self, operations: int) -> list[Step]:
        """What is needed for the last quantity, in an order in which it can be told: each
        operation takes what the one before gave."""
        rng = self._rng
        kinds = rng.choice(list(WORLDS)).split()
        places = [place for place in self._places if place.split()[1] in kinds]
        last = self._given(self._drawn(places))
        steps = [last]
        for _ in range(operations):
            if rng.random() < 0.4 and last.value <= LARGEST // 2:
                earlier = [s for s in steps if s is not last and s.value <= LARGEST // 2]
                if earlier and rng.random() < 0.3:
                    other = rng.choice(earlier)
                else:
                    other = self._given(self._drawn(places))
                    steps.append(other)
                last = self._together(self._drawn(places), *rng.sample([last, other], 2))
            else:
                last = self._changed(self._drawn(places), last)
            steps.append(last)
        return steps

    def other(self, needed: Sequence[Step]) -> Step:
        """A statement that is not needed. It may be about the same places and things."""
        rng = self._rng
        quantity = self._beside(rng.choice(needed)) if rng.random() < 0.5 else None
        quantity = quantity or self._drawn(self._places)
        kind = rng.random()
        small = [
            step
            for step in (self._known(needed), self._known(needed))
            if step.value <= LARGEST // 2
        ]
        if kind < 0.4 or not small:
            step = self._given(quantity)
        elif kind < 0.7 or len(small) < 2 or small[0] is small[1]:
            step = self._changed(quantity, small[0])
        else:
            step = self._together(quantity, *small)
        self._others.append(step)
        return step

    def _known(self, needed: Sequence[Step]) -> Step:
        pool = self._others if self._others and self._rng.random() < 0.7 else needed
        return self._rng.choice(pool)

    def _drawn(self, places: Sequence[str]) -> Quantity:
        """A quantity that was not spoken of yet."""
        while True:
            place = self._rng.choice(places)
            if quantity := self._unless_taken(place, self._rng.choice(self._things[place])):
                return quantity

    def _beside(self, step: Step) -> Quantity | None:
        """A quantity of the same place, or of the same things in another place, if one is left."""
        place, thing = step.quantity
        if self._rng.random() < 0.5:
            return self._unless_taken(place, self._rng.choice(self._things[place]))
        place = self._rng.choice(self._places)
        return self._unless_taken(place, thing) if thing in self._things[place] else None

    def _unless_taken(self, place: str, thing: str) -> Quantity | None:
        if (place, thing) in self._taken:
            return None
        self._taken.add((place, thing))
        return place, thing

    def _given(self, quantity: Quantity) -> Step:
        value = self._rng.randint(2, 20)
        return Step(quantity, value, f"{quantity[0]} has {value} {quantity[1]}.")

    def _changed(self, quantity: Quantity, of: Step) -> Step:
        (place, thing), value = quantity, of.value
        by = self._rng.randint(2, 9)
        times = self._rng.randint(2, 4)
        ways = [
            ("more", "+", by, value + by),
            ("fewer", "-", by, value - by),
            ("times", "*", times, value * times),
        ]
        possible = [way for way in ways if 2 <= way[3] <= LARGEST]
        way, sign, number, result = self._rng.choice(possible)
        place_of, thing_of = of.quantity
        if way == "times":
            text = f"{place} has {number} times as many {thing} as {place_of} has {thing_of}."
        else:
            text = f"{place} has {number} {way} {thing} than {place_of} has {thing_of}."
        return Step(quantity, result, text, f"{value} {sign} {number} = ")

    def _together(self, quantity: Quantity, one: Step, two: Step) -> Step:
        place, thing = quantity
        parts = " and ".join(" has ".join(step.quantity) for step in (one, two))
        text = f"{place} has as many {thing} as {parts} together."
        return Step(quantity, one.value + two.value, text, f"{one.value} + {two.value} = ")
