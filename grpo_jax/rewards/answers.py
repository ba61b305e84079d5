r"""Answers in texts: extraction, and comparison with the expected answer.

An answer is read into a value. A number becomes a fraction. Tuples, sets and matrices become the values of their
elements. Any other formula becomes a text in which equal formulas are written in one way. Two answers are equal if
their values are equal, and if labels (x = 5) and units (5 cm) agree where both have one.

No text is evaluated as code, and every pattern takes time proportional to the length of the text.
"""

import contextlib
import re
from collections.abc import Callable, Hashable, Iterable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

Extract = Callable[[str], str | None]  # a completion -> its answer, or None without one
Same = Callable[[str, str], bool]  # (stated, expected) -> whether two formulas are equal

_HUGE_EXPONENT = re.compile(r"[eE][-+]?\d{4}")  # a number with one is treated as text
_LONGEST_NUMBER = 64  # in characters; a longer number is treated as text
_LONGEST_FORMULA = 500  # in characters; a longer formula is compared as it is written
_MOST_DIGITS = 4000  # of a power; Python writes no integer above 4300 digits
_MOST_NESTED = 8  # tuples within tuples
# Groups of thousands or plain digits, decimals, and an exponent.
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d++(?!\w))?"
_CURRENCY = r"(?:\\?[$£€]\s*)?"
# -$3, 3/4, 3\frac{1}{2}, 10^{5} or 1.5\times10^{5}.
_NUMBER = re.compile(
    rf"{_CURRENCY}(?P<sign>[-+]?)\s*{_CURRENCY}(?:"
    rf"(?P<whole>\d+)?\s*\\frac\{{(?P<top>[-+]?{_DIGITS})\}}\{{(?P<bottom>[-+]?{_DIGITS})\}}"
    rf"|(?P<first>{_DIGITS})(?:/(?P<divisor>{_DIGITS})"
    r"|(?P<times>\s*(?:\\times|\\cdot|\*)\s*10)?\^\{?(?P<power>[-+]?\d{1,3})(?!\d)\}?)?)"
)
# In running text a sign does not follow a digit or a letter, as in 10-5, and a number does not begin inside a word.
# Thai, Chinese, Japanese and Korean have no spaces there.
_IN_WORD = r"[^\W\u0e00-\u0e4f\u3040-\u9fff\uac00-\ud7af]"
_IN_TEXT = re.compile(rf"(?:(?<!{_IN_WORD})(?<![)\]}}.])[-−]\$?|(?<!{_IN_WORD})(?<!\.)){_DIGITS}(?:/\d+)?")
_FORMULA = re.compile(r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?", re.DOTALL)  # \$ does not end it
_WORDS = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname)\s*(?=\{)"


# ---- extraction


def last_number(text: str) -> str | None:
    """Returns the last number in a text."""
    matches = _IN_TEXT.findall(text)
    return matches[-1] if matches else None


def hash_answer(text: str) -> str | None:
    """Returns the text after the last "####" on its line. Hash signs at the end of the text do not count."""
    _, mark, after = text.rstrip("# \n").rpartition("####")
    lines = after.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def boxed_answer(text: str) -> str | None:
    r"""Returns the contents of the last \boxed{...}; None also if its braces do not close."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.lstrip().startswith("{"):
        single = re.match(r"\s+([-\d.,]+|\w)", rest)  # \boxed 5
        return single.group(1) if single else None
    rest, depth = rest.lstrip(), 0
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # \{ and \} are not braces
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0 and brace.group() == "}":
            return rest[1 : brace.start()].strip()
    return None


def stated_answer(text: str) -> str | None:
    r"""Returns the last \boxed{...}, else the text after "answer is", else the last $...$, else the last number."""
    phrase = _phrase_answer(text)
    if phrase is not None:
        return phrase
    formulas = _FORMULA.findall(text)
    return formulas[-1].strip() if formulas else last_number(text)


def _phrase_answer(text: str) -> str | None:
    r"""Returns the last \boxed{...}, else the text after the last "answer is"."""
    boxed = boxed_answer(text)
    stated = re.split(r"answer\s+is|answer[*_]*:", text, flags=re.IGNORECASE)[1:]
    line = next(iter(stated[-1].strip("*_`: \n").splitlines()), "") if stated else ""
    if boxed is not None or not line:
        return boxed
    # The answer ends with its sentence or, if a dollar sign opens it, at the next dollar sign.
    formula = _FORMULA.match(line)
    end = r"\.(?:[\s*_`]|$)|,\s(?=[a-z]{2})|\s(?=because|since|which)"
    return formula.group(1).strip() if formula else re.split(end, line)[0].strip("*_` ")


# ---- numbers

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "±": r"\pm "}
    | {"≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "°": r"^\circ ", "\u2009": r"\,", "\u202f": r"\,", "\xa0": " "}
    | {"½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4"}
)
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!|\\[,;:! ])\s*\d{3})+(?!\d)")
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"k": 1000, "K": 1000, "M": 10**6, "B": 10**9}
_SYNONYMS = (
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"(\d)\s+(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (r"\\(?:left|right)(?![a-z])\.?|\\[bB]igg?[lr]?(?![a-z])|\\(?:display|text)style(?![a-z])|(?<!\\)\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
    (r"\\(le|ge|ne)q(?![a-z])", r"\\\1"),
    (rf"(?<!\s)\s*{_WORDS}\{{\s*(?:or|and)\s*\}}|(?<!\s)\s+(?:or|and)\s", ", "),
)


def _uniform(text: str) -> str:
    """Writes signs in ASCII and fractions as \\frac, and removes sizes, spaces of LaTeX, and marks of thousands."""
    text = re.sub("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), text.translate(_CHARACTERS))
    return " ".join(_rewritten(text, _SYNONYMS).split())


def _rewritten(text: str, rules: Iterable[tuple[str, str]]) -> str:
    """Applies rules (pattern, replacement) in turn."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def parse_number(text: str) -> Fraction | None:
    """Returns the number that is the whole text, such as "1,000", "-$18", "50%", "1/2", "3 1/2" or "10^5"."""
    if len(text) > _LONGEST_FORMULA:
        return None
    text = _uniform(text).rstrip(".").removesuffix("%").removesuffix("\\").strip()
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    return match and _value_of(match)


def _value_of(match: re.Match[str]) -> Fraction | None:
    """Returns the number that `_NUMBER` matched; None for a division by zero, a bad mixed number, or a huge power."""
    whole, top, bottom, first, divisor, times, power = (
        (match[name] or "").replace(",", "")
        for name in ("whole", "top", "bottom", "first", "divisor", "times", "power")
    )
    exponent = int(power or 1)
    huge = power and ("e" in first.lower() or len(first) * abs(exponent) > _MOST_DIGITS)
    if huge or len(match[0]) > _LONGEST_NUMBER or _HUGE_EXPONENT.search(match[0]):
        return None
    with contextlib.suppress(ZeroDivisionError):
        number = Fraction(top) / Fraction(bottom) if top else Fraction(first) / Fraction(divisor or 1)
        if whole and not 0 < number < 1:
            return None
        number = number * Fraction(10) ** exponent if times else number**exponent
        return (number + int(whole or 0)) * (-1 if match["sign"] == "-" else 1)
    return None


def same_number(stated: str, expected: str) -> bool:
    """Returns whether both are equal numbers: "1,000" and "1000.0", "$18" and "18", "50%" and "50", "1/2" and "0.5"."""
    first, second = parse_number(stated), parse_number(expected)
    return first is not None and first == second


def same_text(stated: str, expected: str) -> bool:
    """Returns whether both are the same number or the same text."""
    return stated.strip() == expected.strip() or same_number(stated, expected)


# What may stand before a number: spaces, emphasis, brackets, \boxed{ and the like.
_OPENING = re.compile(rf"(?:[\s*_`~:=≈(\[{{\"'$£€]|\\[$(\[]|\\boxed\s*(?=\{{)|{_WORDS})*+")
_CLOSING = r"[\s*_`)\]}\"'$]*+"
_SCALE = re.compile(rf"({_CLOSING}(?:hundred|thousand|(?:m|b|tr)illion)|[kKMB])(?![a-zA-Z])")
# A formula goes on behind the number: 18x, 18\pi, 18*y, 18^n, 18 and a half.
_CONTINUED = re.compile(
    r"(?![mgshlLCF])[a-zA-Z](?![a-zA-Z])"
    rf"|{_CLOSING}(?:\^(?!\{{?\\circ)|_|\\(?:frac|sqrt|pi|times|cdot|div|pm)(?![a-z])|,\s*an?\s(?:half|third|quarter))"
    r"|[\s)\]}$]*[-+*/=]\s*(?![aI])[a-zA-Z](?![a-zA-Z])"
)
_POWER_OF_UNIT = re.compile(r"(?<=[a-zA-Z}.])\^\{?[23]\}?|(?<=m)[23](?!\d)")  # cm^2, m2
_ALTERNATIVE = re.compile(rf"{_CLOSING}(?:[,/-]|or\b|to\b)[\s*_`$({{\\]*(?:boxed\{{)?\d")
_OR = re.compile(r"[\s*_`$)}]*+(?:or|and)[\s*_`$({\\]*(?:boxed\{)?")


def _leading_number(text: str) -> tuple[Fraction | None, str] | None:
    """Returns the number at the beginning of a text and the text behind it; None if there is none.

    The number is None if it is part of a longer formula.
    """
    text = _uniform(text)
    match = _NUMBER.match(text, _OPENING.match(text).end())  # type: ignore[union-attr]
    if match is None:
        return None
    number, rest = _value_of(match), text[match.end() :]
    scale = _SCALE.match(rest)
    if scale and number is not None:
        number, rest = number * _SCALES[re.sub(r"[^a-zA-Z]", "", scale[0])], rest[scale.end() :]
    return (None if _CONTINUED.match(rest) else number), rest


def hash_number(text: str) -> Fraction | None:
    r"""Returns the number after the last "####".

    The number comes first on the line, apart from $, ** or \boxed{. Words may follow, but no second number.
    """
    leading = _leading_number(hash_answer(text) or "")
    if leading is None or any(x.isnumeric() for x in _POWER_OF_UNIT.sub("", leading[1])):
        return None
    return leading[0]


def stated_number(text: str) -> Fraction | None:
    r"""Returns the number after the last "####", else that in \boxed{} or after "answer is", else the last number.

    None if the text offers two, as in "42 or 43".
    """
    if _leading_number(hash_answer(text) or ""):
        return hash_number(text)
    phrase = _phrase_answer(text)
    leading = _leading_number(phrase.rpartition("=")[2]) if phrase else None
    if leading:
        return None if _ALTERNATIVE.match(leading[1]) else leading[0]
    before, number = 0, None
    for match in _IN_TEXT.finditer(text):
        is_alternative = number and _OR.fullmatch(text, before, match.start())
        before, number = match.end(), None if is_alternative else match
    return parse_number(number[0]) if number else None


# ---- formulas


class Formula(NamedTuple):
    """A formula that can be compared."""

    label: str  # "x" of x = 5; "" without one
    value: Hashable  # a fraction, a text, or the kind and the values of a tuple, set or matrix
    unit: str  # "cm" of 5\text{ cm}; "" without one


# Arguments get their braces: \frac14, \frac{14}3, \sqrt2, x^2, 12_8. Groups in \frac may be nested twice.
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_ARGUMENTS = (
    (r"\\(frac|sqrt)\s*(\\[a-zA-Z]+|\w)", r"\\\1{\2}"),
    (rf"(\\frac\s*{_BRACED})\s*(\\[a-zA-Z]+|\w)", r"\1{\2}"),
    (r"([\^_])\s*(\\[a-zA-Z]+|-?\d+|\w)", r"\1{\2}"),
    (r"(\\[a-zA-Z]+)\s+([a-zA-Z])", r"\1{\2}"),  # \cot x
    (r"(?<![\d\s])\s+|\s+(?![\d\s])", ""),  # not between digits: 2 3 is not 23
    (r"(?<![\w}.])\.(?=\d)", "0."),
)
_TEXT = re.compile(rf"{_WORDS}\{{([^{{}}]*)\}}")
_LABEL = re.compile(  # x, x_1, f(x), \theta, \angle ABC or (x, y)
    r"((?:\\angle\s*)?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([^()=]*\))?|\\[a-zA-Z]+|\([a-zA-Z](?:,\s?[a-zA-Z])+\))"
    r"\s*(?:=|\\in(?![a-z]))(?!.*[=<>])\s*"
)
_BRACKETS = re.compile(r"\\[\\{}]|\\(?:begin|end|cup|pm)(?![a-z])|[()\[\]{},;&]")
_DEPTH = dict.fromkeys(("(", "[", "{", r"\{", r"\begin"), 1) | dict.fromkeys((")", "]", "}", r"\}", r"\end"), -1)
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)
_UNIT = re.compile(
    r"(?P<body>.*[^\s\\])\s*(?:(?P<degree>\^\{?\\circ\s*\}?|\\degree)(?:\s*\\text\{)?\s*[CF]?\}?|\\?(?P<percent>%)"
    rf"|{_WORDS}\{{(?P<text>[a-zA-Z ./]*)\}}(?P<power>\^\{{?[23]\}}?)?"
    r"|(?<=[\d}])\s*(?P<bare>[a-zA-Z][a-zA-Z ./]*)(?P<bare_power>\^\{?[23]\}?)?)",
    re.DOTALL,
)
# The names of each unit. Plurals with an s need no name.
_NAMES = """
    deg degree|% percent|$ dollar|in inch inche|ft feet foot|yd yard|mi mile|m meter metre|mm millimeter millimetre
    |cm centimeter centimetre|km kilometer kilometre|s sec second|min minute|h hr hour|g gram|kg kilogram|mg milligram
    |l liter litre|ml milliliter millilitre"""
_UNITS = {name: names.split()[0] for names in _NAMES.split("|") for name in names.split()}
_NO_UNITS = {"squared", "cubed", "factorial", "plus", "minus", "times", "over", "point"}


def read_formula(text: str) -> Formula:
    r"""Reads a formula, such as x = 5, 5\text{ cm}, \frac14, (1, 2], \{1, 2\}, a matrix, or text such as (C)."""
    if len(text) > _LONGEST_FORMULA:
        return Formula("", text.strip(), "")
    text = re.sub(r"^[$*`\s]+|(?<!\\)[$*`\s.,;]+$", "", _uniform(text))
    text = re.sub(r"^\\[(\[]|\\[)\]]$", "", text).strip()
    if whole := _TEXT.fullmatch(text):
        text = whole[1].strip()
    label = _LABEL.match(text)
    body, unit, scale = _split_unit(text[label.end() :] if label else text)
    value = _read_value(body, _MOST_NESTED)
    value = value * scale if isinstance(value, Fraction) else value
    return Formula("".join(label[1].split()) if label else "", value, unit)


def _split_unit(text: str) -> tuple[str, str, int]:
    """Returns a text without its unit, the unit in one way of writing, and the factor of a word such as "million"."""
    money = re.match(r"([-+]?)\s*(?:\\\$|[$£€])\s*", text)
    text, unit = (money[1] + text[money.end() :], "$") if money else (text, "")
    match = _UNIT.fullmatch(text)
    if match is None:
        return text, unit, 1
    if match["degree"] or match["percent"]:
        return match["body"], "deg" if match["degree"] else "%", 1
    words = re.findall("[a-zA-Z]+", match["text"] or match["bare"] or "")
    names = [word if word in _UNITS else word.lower().removesuffix("s") for word in words]
    power = (match["power"] or match["bare_power"] or "")[-2:].strip("^{}")
    for name, exponent in (("square", "2"), ("sq", "2"), ("cubic", "3")):
        if name in names:
            names.remove(name)
            power = exponent
    shortest = 4 if match["bare"] else 2  # 5ab is a product
    is_known = bool(names) and names[0] in _UNITS and len(match["bare"] or "text") > 1  # 5m is a product, too
    if not is_known and (not names or len(names[0]) < shortest or {*words} & _NO_UNITS):
        return text, unit, 1
    if names[0] in _SCALES:
        return match["body"], unit or " ".join(names[1:]), _SCALES[names[0]]
    return match["body"], unit or "/".join(_UNITS.get(name, name) for name in names if name != "per") + power, 1


def _read_value(text: str, nested: int) -> Hashable:
    r"""Returns the value of a formula, apart from its label and unit. Deeper tuples than `nested` are read as texts."""
    for _ in range(2):
        text = _TEXT.sub(r"\1", text).strip()  # \textbf{\text{A}}
    while (group := _enclosed(text)) and (group[0] == "{" or (group[0] == "(" and len(_split(group[1], ",")) == 1)):
        text = group[1].strip()
    leaf = _rewritten(text, _ARGUMENTS)
    number = _NUMBER.fullmatch(leaf) if len(leaf) <= _LONGEST_NUMBER and ", " not in text else None
    if number and (value := _value_of(number)) is not None:
        return value
    read = partial(_read_value, nested=nested - 1)
    if not nested:
        return leaf
    if matrix := _MATRIX.fullmatch(text):
        rows = [_split(row, "&") for row in _split(matrix[2], r"\\") if row]
        return "matrix", tuple(("row", tuple(map(read, row))) for row in rows)
    if len(parts := _split(text, r"\cup")) > 1:
        return "union", tuple(sorted(map(read, parts), key=repr))
    if group and group[0] in "([":
        return group[0] + group[2], tuple(map(read, _split(group[1], ",")))
    items = [item for item in _split(group[1] if group else text, ",") if item]
    labels = [_LABEL.match(item) for item in items]
    if len({label and label[1] for label in labels}) == 1:  # x=1, x=2
        items = [item[label.end() :] if label else item for item, label in zip(items, labels, strict=True)]
    ends = [_split(item, r"\pm") for item in items]
    items = [sign.join(pair) for pair in ends for sign in ("+-" if len(pair) == 2 else [r"\pm"])]
    if len(items) > 1:
        return "set", tuple(sorted(map(read, items), key=repr))
    if group and items:
        return read(items[0])
    return leaf.lower() if re.fullmatch("[A-Z]?[a-z]{2,}", leaf) else leaf.removeprefix("+")


def _split(text: str, separator: str) -> list[str]:
    """Splits a text at the separators that are in no bracket."""
    depth, start, parts = 0, 0, []
    for match in _BRACKETS.finditer(text):
        depth += _DEPTH.get(match[0], 0)
        if match[0] == separator and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """Returns the bracket that opens a text, the text in it, and the bracket that closes it at the end; else None."""
    depth, first = 0, ""
    for match in _BRACKETS.finditer(text):
        depth += _DEPTH.get(match[0], 0)
        first = first or match[0]
        if match.start() == 0 and match[0] not in ("(", "[", "{", r"\{"):
            return None
        if depth <= 0:
            is_whole = text.startswith(first) and match.end() == len(text)
            return (first, text[len(first) : match.start()], match[0]) if is_whole else None
    return None


def same_formula(stated: str, expected: str, same_leaf: Same | None = None) -> bool:
    """Returns whether two formulas are equal.

    Args:
      stated, expected: The formulas.
      same_leaf: Compares formulas, or elements of tuples and the like, that are written differently. None: they differ.

    Returns:
      The result. A label or a unit that only one of them has does not count.
    """
    first, second = read_formula(stated), read_formula(expected)
    units = {first.unit, second.unit}
    if (first.label and second.label and first.label != second.label) or ("" not in units and len(units) > 1):
        return False
    values = first.value, second.value
    if units == {"", "%"} and all(isinstance(value, Fraction) for value in values):
        a, b = (x.value / 100 if x.unit == "%" else x.value for x in (first, second))  # type: ignore[operator]
        return a == b or values[0] == values[1]
    if _same_values(*values, same_leaf):
        return True
    # y = -2x and 2x + y = 0: only one of them has the form of a label
    are_texts = all(isinstance(value, str) for value in values)
    return same_leaf is not None and are_texts and first.label != second.label and same_leaf(stated, expected)


def _same_values(stated: Hashable, expected: Hashable, same_leaf: Same | None) -> bool:
    if stated == expected:
        return stated != ""
    if isinstance(stated, tuple) and isinstance(expected, tuple):
        (kind, elements), (expected_kind, left) = stated, list(expected)
        if kind != expected_kind or len(elements) != len(left):
            return False
        left = list(left)
        for element in elements:
            candidates = left if kind in ("set", "union") else left[:1]
            partner = next((x for x in candidates if _same_values(element, x, same_leaf)), None)
            if partner is None:
                return False
            left.remove(partner)
        return True
    if isinstance(stated, tuple) or isinstance(expected, tuple) or (type(stated) is type(expected) is Fraction):
        return False
    return same_leaf is not None and same_leaf(str(stated), str(expected))
