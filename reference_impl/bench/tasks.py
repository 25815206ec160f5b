"""Generated tasks with one right answer each, so that evaluation has something to measure.

A task is a (prompt, answer) pair for one chat turn. Training draws from `random.Random` seeds below
2**40, evaluation from seeds above: the two never see the same generator state.

    retrieval   a key and its value, some distance of other text between them and the question
    json_call   one line of English to a small JSON tool call
    copying     repeat a list of made-up words
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

Task = tuple[str, str]
EVALUATION_SEED = 2**40

_SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa pe pi po ra "
    "re ri ro ru sa se si so ta te ti to va ve vi vo za ze zo "
).split()
_CITIES = (
    "Oslo Paris Lima Cairo Delhi Tokyo Berlin Madrid Quito Rome Vienna Dublin Nairobi Hanoi Seoul Accra Lisbon Prague "
).split()
_PEOPLE = ("Ada Alan Grace Edsger Barbara Donald Katherine Dennis Ken Margaret Linus Radia Tim Frances ").split()
_UNITS = ("celsius", "fahrenheit")
_WORDS = (
    "red blue green small large fast slow old new cold warm paper stone river cloud apple table chair window garden "
).split()


def made_up_word(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def _value(rng: random.Random) -> str:
    return str(rng.randint(1000, 9999)) if rng.random() < 0.5 else made_up_word(rng)


def _needle(rng: random.Random, key: str, value: str) -> str:
    return rng.choice((f"The code for {key} is {value}.", f"{key} = {value}", f"{key}: {value}"))


def retrieval(rng: random.Random, filler: Callable[[random.Random, int], str], distance: int) -> Task:
    """A needle, about `distance` tokens of other text after it, then the question.

    filler(rng, n) returns running text of about n tokens.
    """
    key, value = made_up_word(rng), _value(rng)
    pieces = [_needle(rng, key, value)]
    if rng.random() < 0.5:  # other keys beside it: the answer is not "the only number here"
        pairs = {made_up_word(rng): _value(rng) for _ in range(rng.randint(1, max(1, min(12, distance // 12))))}
        pairs.pop(key, None)
        others = [_needle(rng, k, v) for k, v in pairs.items()]
        spent = 9 * len(others)
    else:
        others, spent = [], 0
    if distance - spent > 8:
        text = filler(rng, distance - spent)
        cut = rng.randint(0, len(text))
        pieces += [text[:cut], *others, text[cut:]]
    else:
        pieces += others
    body = "\n".join(p for p in pieces if p)
    return f"{body}\nWhat is the code for {key}?", value


def json_call(rng: random.Random) -> Task:
    kind = rng.randrange(5)
    if kind == 0:
        city, unit = rng.choice(_CITIES), rng.choice(_UNITS)
        prompt = rng.choice((f"Weather in {city} in {unit}, please.", f"What is the weather in {city}? Use {unit}."))
        call = {"name": "get_weather", "arguments": {"city": city, "unit": unit}}
    elif kind == 1:
        to, text = rng.choice(_PEOPLE), " ".join(rng.sample(_WORDS, rng.randint(2, 5)))
        prompt = rng.choice((f"Send {to} a message: {text}", f"Tell {to}: {text}"))
        call = {"name": "send_message", "arguments": {"to": to, "text": text}}
    elif kind == 2:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        op, verb = rng.choice((("add", "plus"), ("multiply", "times"), ("subtract", "minus")))
        prompt = f"Use the calculator: {a} {verb} {b}"
        call = {"name": op, "arguments": {"a": a, "b": b}}
    elif kind == 3:
        title, day, hour = made_up_word(rng), rng.randint(1, 28), rng.randint(0, 23)
        prompt = f"Create an event called {title} on day {day} at {hour} o'clock."
        call = {"name": "create_event", "arguments": {"title": title, "day": day, "hour": hour}}
    else:
        query, limit = " ".join(rng.sample(_WORDS, rng.randint(1, 3))), rng.choice((1, 3, 5, 10))
        prompt = f"Search for {query}, at most {limit} results."
        call = {"name": "search", "arguments": {"query": query, "limit": limit}}
    return prompt, json.dumps(call)


def copying(rng: random.Random) -> Task:
    words = " ".join(made_up_word(rng) for _ in range(rng.randint(3, 24)))
    return f"Repeat: {words}", words
