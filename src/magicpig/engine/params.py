"""What a request may ask of the text it gets: length, randomness, where to stop, log-probabilities.

A bad value or an unknown field is a ``ValueError`` that names the field and the value.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicpig.config import Strict, check_int

# Below this a temperature only adds rounding errors to what greedy decoding gives.
SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams(Strict):
    """How the tokens of a completion are chosen and where it ends.

    max_tokens: the most tokens a completion has.
    temperature: divides the logits, 0 to 100; 0 (or less than 1e-5) takes the likeliest token.
    top_p: draw only among the likeliest tokens that together have this probability; 1 is off.
    top_k: draw only among this many of the likeliest tokens (and any as likely as the last of
        them); 0 is off.
    min_p: draw only among tokens at least this fraction as likely as the likeliest; 0 is off.
    repetition_penalty: divides the positive and multiplies the negative logits of tokens that
        the prompt or the completion already holds; 1 is off, 0.01 to 10.
    seed: equal requests with equal seeds get equal completions; None takes a fresh one each time.
    stop: a string or several; a completion ends before the first of them that it would hold.
    stop_token_ids: tokens that end a completion like the model's own end token.
    ignore_eos: go on after the model's end token.
    logprobs: None for none, 0 for the chosen tokens' alone, up to 20 for as many of the likeliest
        tokens' too. They are the model's own: before penalty, temperature and cuts.
    n: completions of the prompt, 1 to 64.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 10)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold strings that are not empty, not {text!r}")
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        for token in stop_token_ids:
            check_int("stop_token_ids", token, 0, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be a bool, not {self.ignore_eos!r}")
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, 20)
        check_int("n", self.n, 1, 64)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of drawing one."""
        return self.temperature < SMALLEST_TEMPERATURE


def _check_number(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high or (above and value == low):
        bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise ValueError(f"{name} must be {bounds}, not {value}")


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list or a tuple, not {value!r}")
    return tuple(value)
