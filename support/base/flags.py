"""Flags: their ranges, and the command line as a dataclass."""

import inspect
import shlex
from dataclasses import dataclass, fields, make_dataclass
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from support.base.errors import UsageError


@dataclass(frozen=True)
class Range:
    """The values that a flag may have, both ends included: Annotated[int, Range(1, 64)]."""

    low: float
    high: float = 10**12  # steps, tokens, …: a larger number is a slip of the finger
    above: bool = False  # without the lower end

    def __contains__(self, x: float | str) -> bool:
        if isinstance(x, str):  # a word that the flag knows, such as auto
            return True
        return self.low <= x <= self.high and not (self.above and x == self.low)

    def __str__(self) -> str:
        low = "above" if self.above else "at least"
        return f"{low} {self.low:,} and at most {self.high:,}"


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]  # 0 has a meaning of its own: off, all, or automatic
Amount = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
Fraction = Annotated[float, Range(0, 1, above=True)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def show_default(text: str) -> str:
    """A default as --help shows it: not as a shell would need it, and not if it is empty."""
    plain = " ".join(shlex.split(text))
    return f"(default: {plain})" if plain else ""


String = Annotated[str, tyro.conf.arg(help_behavior_hint=show_default)]
# all after one flag; a flag that may be repeated is tyro's UseAppendAction
Strings = Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint=show_default)]


def flag_of(name: str) -> str:
    """A field's flag, as one types it."""
    return f"--{name.replace('_', '-')}"


def out_of_range(config: Any) -> list[str]:
    """The flags of a dataclass that are outside the Range in their type, a sentence each."""
    problems = []
    for name, annotation in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        for allowed in getattr(annotation, "__metadata__", ()):
            if isinstance(allowed, Range) and value not in allowed:
                problems.append(f"{flag_of(name)} {value}: it must be {allowed}")
    return problems


def read_flags(
    config_class: type, args: list[str], defaults: dict[str, Any], about: str
) -> dict[str, Any]:
    """{name: value} of the flags that a dataclass has as fields. about: what --help says first."""
    bases = config_class.__mro__[-1:0:-1]
    groups = [base for base in bases if inspect.get_annotations(base)]
    if not groups:
        default = config_class(**defaults)
        return vars(tyro.cli(config_class, default=default, args=args, description=about))
    # where the fields come from bases, --help shows each base as a group of its own
    parts: list[tuple] = []
    for group in groups:
        default = group(**{f.name: defaults[f.name] for f in fields(group)})
        parts.append((group.__name__, Annotated[group, tyro.conf.OmitArgPrefixes], default))
    flags = make_dataclass("Flags", parts, frozen=True)
    parsed: Any = tyro.cli(flags, args=args, description=about)
    return {name: value for part in vars(parsed).values() for name, value in vars(part).items()}


def parse_flags(config_class: type, args: list[str]) -> Any:
    """The command line as a dataclass. Raises UsageError for values that are out of range."""
    defaults = vars(config_class())
    config = config_class(**read_flags(config_class, args, defaults, config_class.__doc__ or ""))
    problems = out_of_range(config)
    typed = [arg.partition("=")[0].replace("_", "-") for arg in args]
    for name, kind in get_type_hints(config_class, include_extras=True).items():
        flag = flag_of(name)
        if kind == Strings and typed.count(flag) > 1:  # tyro would take the last one
            problems.append(f"{flag} is given twice: name all after one {flag}")
        if kind == Strings and flag in typed and not getattr(config, name):
            problems.append(f"{flag} names nothing")
    if problems:
        raise UsageError(*problems)
    return config


def drop_flags(args: list[str], *flags: str) -> list[str]:
    """The arguments without these flags and their values."""
    kept: list[str] = []
    dropping = False  # the value of a flag that was dropped
    for arg in args:
        if arg.startswith("--"):
            flag, with_value, _ = arg.partition("=")
            is_out = flag.replace("_", "-") in flags
            dropping = is_out and not with_value
        else:
            is_out = dropping
        if not is_out:
            kept.append(arg)
    return kept
