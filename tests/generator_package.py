"""The text of a package with two generators, which the fixture `stand_in` puts in place of reasoning_gym."""

FACTORY = '''
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace


@dataclass
class Config:
    low: int = 0
    high: int = 29


class Sums:
    def __init__(self, seed, size, low=0, high=29):
        assert low < high, "low must be below high"
        self.seed, self.low, self.high = seed, low, high

    def __getitem__(self, index):
        noise = Random(self.seed + index)
        a, b = noise.randint(self.low, self.high), noise.randint(self.low, self.high)
        return {"question": f"{a}+{b}=", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        return 1.0 if int(answer) == int(entry["answer"]) else 0.1


class Listed(Sums):
    """Makes its entries in advance, as some generators do."""

    def __init__(self, seed, size, **options):
        super().__init__(seed, size, **options)
        self.entries = [super(Listed, self).__getitem__(i) for i in range(size)]

    def __getitem__(self, index):
        return self.entries[index]


class Long(Sums):
    """Makes as many terms as are asked for."""

    def __getitem__(self, index):
        return {"question": "+".join(str(i) for i in range(int(self.high))), "answer": "0", "metadata": {}}


class LongInAdvance(Long):
    """Makes its entries when it is opened."""

    def __init__(self, seed, size, **options):
        super().__init__(seed, size, **options)
        self[0]


class Curriculum:
    attributes = {"high": SimpleNamespace(levels=[30, 60, -1, 90])}

    def set_global_level(self, level):
        self.level = level

    def generate_configuration(self):
        return Config(high=self.attributes["high"].levels[self.level])


DATASETS = {"sums": Sums, "listed": Listed, "codeio": Listed, "long": Long, "advance": LongInAdvance}


def create_curriculum(name):
    if name != "sums":
        raise ValueError("No curriculum registered")
    return Curriculum()


def create_dataset(name, **options):
    return DATASETS[name](**options)
'''
