"""Checks which answers are accepted: a table of cases, published solutions, and texts that could take for ever."""

import importlib.util
import time
from fractions import Fraction

import pytest
from tiny import DATA, needs_data, read_lines

from grpo_jax.data.types import Completion
from grpo_jax.rewards import answers, builtin
from grpo_jax.rewards.processes import Grader

has_math_verify = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs math-verify")
REWARDS = {
    "gsm8k": builtin.gsm8k_answer(),
    "gsm8k lenient": builtin.gsm8k_answer(lenient=True),
    "gsm8k official": builtin.gsm8k_official(),
    "math": builtin.math_answer(sympy=False),
    "math lenient": builtin.math_answer(lenient=True, sympy=False),
}

# (reward, the answer of the row, text of the model, accepted, reason)
CASES = [
    # ---- GSM8K, strict
    ("gsm8k", "18", "9 * 2 = 18\n#### 18", True, "the form of the data"),
    ("gsm8k", "18", "####18", True, "a space is optional"),
    ("gsm8k", "18", "####\n18", True, "the number may be on the next line"),
    ("gsm8k", "18", "#### 3\n#### 18", True, "the last mark counts"),
    ("gsm8k", "18", "#### 18\n#### 3", False, "the last mark counts"),
    ("gsm8k", "18", "#### 18 ####", True, "marks at the end enclose the number"),
    ("gsm8k", "18", "The answer is 18.", False, "no mark"),
    ("gsm8k", "18", "#### ", False, "no number"),
    ("gsm8k", "18", "", False, "no text"),
    ("gsm8k", "18", "#### 18.", True, "a full stop"),
    ("gsm8k", "18", "#### 18.00", True, "the same number"),
    ("gsm8k", "18", "#### 18 dollars", True, "text after the number"),
    ("gsm8k", "18", "#### 18 dollars per hour", True, "text after the number"),
    ("gsm8k", "18", "#### 18/hour", True, "a unit"),
    ("gsm8k", "18", "#### 18km", True, "a unit"),
    ("gsm8k", "18", "#### 18 m^2", True, "the power of a unit"),
    ("gsm8k", "18", "#### 18 m²", True, "the power of a unit"),
    ("gsm8k", "18", r"#### 18\text{ cm}^{2}", True, "the power of a unit"),
    ("gsm8k", "18", "#### 18%", True, "GSM8K writes percentages without the sign"),
    ("gsm8k", "18", r"#### 18\%", True, "GSM8K writes percentages without the sign"),
    ("gsm8k", "18", "#### 18°", True, "a unit"),
    ("gsm8k", "18", "#### $18", True, "a dollar sign"),
    ("gsm8k", "18", r"#### \$18", True, "an escaped dollar sign"),
    ("gsm8k", "18", "#### $18$", True, "a formula"),
    ("gsm8k", "18", r"#### \(18\)", True, "a formula"),
    ("gsm8k", "18", "#### €18", True, "another currency"),
    ("gsm8k", "18", "#### **18**", True, "bold"),
    ("gsm8k", "18", "#### **$18**", True, "bold, with a dollar sign"),
    ("gsm8k", "18", "#### __18__ eggs", True, "bold"),
    ("gsm8k", "18", "#### `18`", True, "code"),
    ("gsm8k", "18", r"#### \boxed{18}", True, "boxed"),
    ("gsm8k", "18", r"#### $\boxed{18}$.", True, "boxed in a formula"),
    ("gsm8k", "18", r"#### \boxed{\$18}", True, "boxed, with a dollar sign"),
    ("gsm8k", "18", r"#### \textbf{18}", True, "bold in LaTeX"),
    ("gsm8k", "18", "#### = 18", True, "an equals sign before it"),
    ("gsm8k", "18", "#### (18)", True, "brackets"),
    ("gsm8k", "18", "#### 18 (a dozen and a half)", True, "text after the number"),
    ("gsm8k", "18", "#### 18\nthat is 3 times 6", True, "later lines do not count"),
    ("gsm8k", "18", "#### 18 of 20", False, "two numbers"),
    ("gsm8k", "18", "#### 18 or 19", False, "two numbers"),
    ("gsm8k", "18", "#### 19 or 18", False, "two numbers"),
    ("gsm8k", "18", "#### 18, 19", False, "two numbers"),
    ("gsm8k", "18", "#### 18-20", False, "a range"),
    ("gsm8k", "18", "#### 18–20", False, "a range"),
    ("gsm8k", "18", "#### 18:30", False, "a time"),
    ("gsm8k", "18", "#### 18 - 3", False, "a difference"),
    ("gsm8k", "18", "#### 3 * 6 = 18", False, "the number comes first"),
    ("gsm8k", "23", "#### 2**3", False, "a power, not bold"),
    ("gsm8k", "23", "#### 2 3", False, "two numbers"),
    ("gsm8k", "18", "#### 18x", False, "a product"),
    ("gsm8k", "18", "#### 18*y", False, "a product"),
    ("gsm8k", "18", r"#### 18\pi", False, "a product"),
    ("gsm8k", "18", "#### 18π", False, "a product"),
    ("gsm8k", "18", r"#### 18\sqrt{2}", False, "a product"),
    ("gsm8k", "18", "#### 18 + x", False, "a sum"),
    ("gsm8k", "18", "#### 18^n", False, "a power"),
    ("gsm8k", "18", "#### 18²", False, "a power"),
    ("gsm8k", "324", "#### 18²", True, "a power"),
    ("gsm8k", "18", "#### 18 and a half", False, "another number"),
    ("gsm8k", "18", "#### 18½", False, "another number"),
    ("gsm8k", "18.5", "#### 18½", True, "a mixed number"),
    ("gsm8k", "18", "#### 18 thousand", False, "another number"),
    ("gsm8k", "18000", "#### 18 thousand dollars", True, "a number in words"),
    ("gsm8k", "18000", "#### $18k", True, "a number with a suffix"),
    ("gsm8k", "1500000", "#### 1.5 million", True, "a number in words"),
    ("gsm8k", "18", "#### eighteen", False, "no digits"),
    ("gsm8k", "18", "#### the total is 18", False, "the number comes first"),
    ("gsm8k", "18", "#### < 18", False, "an inequality"),
    ("gsm8k", "18", "#### not 18", False, "the number comes first"),
    ("gsm8k", "18", "#### -18", False, "the sign"),
    ("gsm8k", "-18", "#### -$18", True, "the sign before the dollar sign"),
    ("gsm8k", "-18", "#### $-18", True, "the sign after the dollar sign"),
    ("gsm8k", "-18", "#### −18", True, "the minus sign of Unicode"),
    ("gsm8k", "18", "#### +18", True, "a plus sign"),
    ("gsm8k", "1,000", "#### 1000", True, "a separator of thousands in the data"),
    ("gsm8k", "1000", "#### 1,000 eggs", True, "a separator of thousands"),
    ("gsm8k", "1000", r"#### 1{,}000", True, "a separator of thousands in LaTeX"),
    ("gsm8k", "1000", r"#### 1\,000", True, "a separator of thousands in LaTeX"),
    ("gsm8k", "1000", "#### 1\u202f000", True, "a separator of thousands in Unicode"),
    ("gsm8k", "1", "#### 1,000", False, "a separator of thousands"),
    ("gsm8k", "12", "#### 1,2", False, "two numbers"),
    ("gsm8k", "1", "#### 1,2", False, "two numbers"),
    ("gsm8k", "1234", "#### 1,234,5", False, "no groups of three"),
    ("gsm8k", "0.5", "#### 1/2", True, "a fraction"),
    ("gsm8k", "0.5", r"#### \frac{1}{2}", True, "a fraction in LaTeX"),
    ("gsm8k", "1.5", "#### 1 1/2 cups", True, "a mixed number"),
    ("gsm8k", "0.5", "#### .5", True, "no zero before the point"),
    ("gsm8k", "1", "#### 1/0", False, "no number"),
    ("gsm8k", "1000", "#### 1e3", True, "an exponent"),
    ("gsm8k", "1", "#### 1e999999999", False, "an enormous exponent"),
    ("gsm8k", "1", "#### 1^999999999", False, "an enormous exponent"),
    ("gsm8k", "9", "#### " + "9" * 100_000, False, "an enormous number"),
    ("gsm8k", "18", "#### nan", False, "no number"),
    ("gsm8k", "18", "#### inf", False, "no number"),
    ("gsm8k", "18", "#### ∞", False, "no number"),
    ("gsm8k", "18", "#### ١٨", True, "Arabic digits"),
    # ---- GSM8K, lenient
    ("gsm8k lenient", "18", "She makes 18 dollars.", True, "the last number"),
    ("gsm8k lenient", "18", "9 and 9 are 18.", True, "the last number"),
    ("gsm8k lenient", "18", "#### 18\nthat is 3 times 6", True, "the number after the mark comes first"),
    ("gsm8k lenient", "43", "#### 42 or 43", False, "two numbers"),
    ("gsm8k lenient", "42", "#### 42 or 43", False, "two numbers"),
    ("gsm8k lenient", "43", "It is 42 or 43.", False, "two numbers"),
    ("gsm8k lenient", "43", "It is **42** or **43**.", False, "two numbers"),
    ("gsm8k lenient", "42", "The answer is 42 or 43.", False, "two numbers"),
    ("gsm8k lenient", "43", "The answer is between 42 and 43.", False, "two numbers"),
    ("gsm8k lenient", "5", "The answer is: **5**", True, "bold"),
    ("gsm8k lenient", "5", "**Answer:** 5 eggs, 3 of them white", True, "the stated number"),
    ("gsm8k lenient", "5", "The answer is $5. She had $20.", True, "the stated number"),
    ("gsm8k lenient", "18", "The answer is 3 + 15 = 18.", True, "the result of the sum"),
    ("gsm8k lenient", "5", r"So \boxed{5}, since 2 and 3.", True, "the boxed number"),
    ("gsm8k lenient", "18", "#### Step 3: the total\nSo 18.", True, "a heading is no answer"),
    ("gsm8k lenient", "18", "#### Final answer: 18", True, "the stated number"),
    ("gsm8k lenient", "5", "x5", False, "no number"),
    ("gsm8k lenient", "18", "所以答案是18。", True, "no spaces between words"),
    ("gsm8k lenient", "-18", "一共是-18个", True, "no spaces between words"),
    ("gsm8k lenient", "18", "一共是-18个", False, "the sign"),
    ("gsm8k lenient", "18", "", False, "no text"),
    # ---- GSM8K's own pattern
    ("gsm8k official", "18", "#### 18", True, "the form of the data"),
    ("gsm8k official", "1,000", "#### 1000", True, "commas do not count"),
    ("gsm8k official", "18", "#### 18 dollars", True, "text after the number"),
    ("gsm8k official", "18", "#### 18 or 19", True, "it takes the first number"),
    ("gsm8k official", "18", "#### 18\n#### 3", True, "it takes the first mark"),
    ("gsm8k official", "18", "####18", False, "it needs a space"),
    ("gsm8k official", "18", "#### $18", False, "no dollar sign"),
    ("gsm8k official", "18", "#### **18**", False, "no bold"),
    ("gsm8k official", "18", "#### 18.00", False, "it compares texts"),
    ("gsm8k official", "18", "#### 18.", False, "it compares texts"),
    ("gsm8k official", "-5", "#### -5", True, "a sign"),
    # ---- MATH, boxed
    ("math", r"\frac{1}{2}", r"so \boxed{\dfrac12}.", True, "a fraction"),
    ("math", "2", r"\boxed{1} or \boxed{2}", True, "the last box"),
    ("math", "2", "2", False, "no box"),
    ("math", "42", r"\boxed {42}", True, "a space before the brace"),
]
FORMULAS = [
    ("0.5", r"\frac{1}{2}", True, "the same number"),
    ("-1/2", r"-\frac{1}{2}", True, "the same number"),
    (r"\frac{14}{3}", r"\frac{14}3", True, "an argument without braces"),
    (r"\frac{14}{3}", r"\frac 5{9}", False, "another number"),
    (r"\frac{3\sqrt{3}}{4}", r"\frac{3\sqrt3}4", True, "arguments without braces"),
    (r"\frac{\pi}{2}", r"\frac\pi2", True, "arguments without braces"),
    (r"\frac{1}{3}", "0.33", False, "rounded"),
    (r"\frac{1}{3}", "0.333333", False, "rounded"),
    ("1000", "1{,}000", True, "a separator of thousands"),
    ("1000", r"1\,000", True, "a separator of thousands"),
    ("(1000,2)", r"(1{,}000, 2)", True, "a separator of thousands in a tuple"),
    ("1000,2000", r"1{,}000,2{,}000", True, "separators of thousands in a list"),
    ("1000", "1,000", True, "a separator of thousands"),
    (r"11,\! 111,\! 111,\! 100", "11111111100", True, "separators of thousands"),
    ("10,200", "10, 200", False, "a list"),
    ("1,2", "12", False, "a list"),
    ("23", "2 3", False, "two numbers"),
    ("23", r"2\,3", False, "two numbers"),
    ("23", r"2\ 3", False, "two numbers"),
    ("23", "2~3", False, "two numbers"),
    ("23", r"2\quad 3", False, "two numbers"),
    ("6", "2 3", False, "two numbers"),
    ("12_8", "12_{8}", True, "a base"),
    ("12_8", r"12_{\text{8}}", True, "a base"),
    ("12_8", "12_9", False, "another base"),
    ("12", "12_8", False, "a base"),
    ("10", "12_8", False, "the same value is not the asked form"),
    ("3.5", r"3\frac{1}{2}", True, "a mixed number"),
    ("3.5", "3 1/2", True, "a mixed number"),
    ("-3.5", r"-3\frac12", True, "a mixed number"),
    ("1.5", r"3\frac{1}{2}", False, "a mixed number is no product"),
    ("31/2", "3 1/2", False, "a mixed number"),
    ("137 \\frac{1}{2}", "137.5", True, "a mixed number"),
    ("10^5", "10^{5}", True, "an argument without braces"),
    ("100000", "10^{5}", True, "a power"),
    ("100000", "10⁵", True, "a power"),
    ("105", "10^{5}", False, "a power"),
    ("150000", r"1.5 \times 10^5", True, "a power of ten"),
    ("0.001", "10^{-3}", True, "a power"),
    ("-4", "-2^2", True, "the sign is not squared"),
    ("1", "1e999999999", False, "an enormous exponent"),
    ("1", "9^{999999999}", False, "an enormous exponent"),
    ("1", "9e999^{999}", False, "an enormous exponent"),
    (r"\text{(C)}", "C", True, "a choice"),
    ("C", r"\text{(C)}", True, "a choice"),
    (r"\text{(C)}", r"\textbf{(C)}", True, "a choice"),
    (r"\text{(C)}", "(C)", True, "a choice"),
    (r"\text{(C)}", r"\text{(D)}", False, "another choice"),
    (r"\text{even}", "even", True, "a word"),
    (r"\text{even}", r"\text{Even}", True, "a word"),
    (r"\text{even}", r"\text{odd}", False, "another word"),
    (r"\text{Evelyn}", r"\text{Navin}", False, "another name"),
    (r"\text{Evelyn}", r"\text{nylevE}", False, "the letters of a word are no factors"),
    ("5", r"5\text{x}", False, "a product"),
    ("5x", r"5\text{x}", True, "a product"),
    ("5", "5x", False, "a product"),
    ("5", "5ab", False, "a product"),
    ("5m", "5", False, "a product"),
    ("5", "5 cm or 6 cm", False, "two answers"),
    ("5", "5 kilometers per hour", True, "a unit that the row leaves out"),
    ("5", r"5\pi", False, "a product"),
    ("5", r"5\text{ cm}", True, "a unit that the row leaves out"),
    ("5", "5 cm", True, "a unit that the row leaves out"),
    ("5", r"5\,\mathrm{m}", True, "a unit that the row leaves out"),
    ("5", r"\text{5 cm}", True, "a unit that the row leaves out"),
    ("5", "5 apples", True, "a unit that the row leaves out"),
    (r"5\text{ cm}", "5", True, "the unit is left out"),
    (r"5\text{ cm}", r"5\text{ m}", False, "another unit"),
    (r"5\text{ cm}", "5 centimeters", True, "another name of the unit"),
    (r"15\mbox{ cm}^2", r"15\text{ cm}", False, "another unit"),
    (r"864 \mbox{ inches}^2", r"864 \text{ square inches}", True, "another name of the unit"),
    (r"864 \mbox{ inches}^2", r"864\text{ in}^{2}", True, "another name of the unit"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}^\circ", True, "another name of the unit"),
    ("90^\\circ", "90", True, "the unit is left out"),
    ("90^\\circ", "90°", True, "the sign in Unicode"),
    ("90^\\circ", r"90\%", False, "another unit"),
    (r"5.4 \text{ cents}", r"\$5.4", False, "another unit"),
    (r"\$36", "36", True, "the unit is left out"),
    (r"\$32,\!348", r"32348 \text{ dollars}", True, "another name of the unit"),
    ("50", r"50\%", True, "MATH leaves out the sign"),
    ("0.5", r"50\%", True, "the same number"),
    ("50", "0.5", False, "another number"),
    (r"50\%", "0.5", True, "the same number"),
    ("25", "5 squared", False, "no unit"),
    ("5", r"5\text{ squared}", False, "no unit"),
    ("5", r"5\text{ million}", False, "another number"),
    ("5000000", r"5\text{ million}", True, "a number in words"),
    ("x=5", "5", True, "the label is left out"),
    ("5", "x=5", True, "a label that the row leaves out"),
    ("x=5", "x = 5", True, "spaces"),
    ("x=5", "y=5", False, "another label"),
    (r"x \in [-2,7]", "[-2,7]", True, "the label is left out"),
    ("y = 2x + 3", "2x+3", True, "the label is left out"),
    ("(3,4)", "(x,y) = (3,4)", True, "a label that the row leaves out"),
    (r"30^\circ", r"\angle ABC = 30^\circ", True, "a label that the row leaves out"),
    ("5", "x=5=y", False, "two equations"),
    ("1,-2", "-2, 1", True, "roots in another order"),
    ("1,-2", r"x=1 \text{ or } x=-2", True, "roots in words"),
    ("1,-2", "1", False, "a root is left out"),
    ("1,-2", "x=1,y=-2", False, "values of two variables"),
    ("5", r"5 \text{ or } 6", False, "two answers"),
    ("6", "5 or 6", False, "two answers"),
    ("3,-3", r"\pm 3", True, "both signs"),
    ("3", r"\pm 3", False, "two answers"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}", True, "both signs"),
    (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1 - \sqrt5, 1+\sqrt5\}", True, "the order of a set"),
    (r"\{1,2\}", r"\{2,1\}", True, "the order of a set"),
    (r"\{1,2\}", r"\{1,2,3\}", False, "another set"),
    ("(1,2)", "(2,1)", False, "the order of a pair"),
    ("(1,2)", r"\left( 1, 2 \right)", True, "spaces and sizes"),
    ("(1,2)", "(1.0,\\frac42)", True, "equal elements"),
    ("(1,2)", "[1,2]", False, "another interval"),
    ("(1,2]", "(1,2)", False, "another interval"),
    ("(1,2)", r"\{1,2\}", False, "a set is no pair"),
    ("(1,2)", "1,2", False, "a list is no pair"),
    ("(1,234)", "(1, 234)", True, "a pair of numbers"),
    ("1234", "(1,234)", False, "a pair of numbers"),
    (r"(2,\infty)", r"(2, +\infty)", True, "a plus sign"),
    (r"(2,\infty)", "(2, ∞)", True, "the sign in Unicode"),
    (r"(2,\infty)", r"(2, -\infty)", False, "the sign"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)", True, "the order of a union"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2]\cup(3,\infty)", False, "another interval"),
    (
        r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
        r"\begin{pmatrix}-\frac13\\ \frac{2}{3}\end{pmatrix}",
        True,
        "entries",
    ),
    (r"\begin{pmatrix} 1\\2 \end{pmatrix}", r"\begin{bmatrix}1\\ 2\end{bmatrix}", True, "other brackets"),
    (r"\begin{pmatrix} 1\\2 \end{pmatrix}", r"\left(\begin{array}{c}1\\2\end{array}\right)", True, "an array"),
    (r"\begin{pmatrix} 12 \end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}", False, "two rows"),
    (r"\begin{pmatrix} 12 \end{pmatrix}", r"\begin{pmatrix}1\\\, 2\end{pmatrix}", False, "two rows"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", False, "a row is no column"),
    (r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix}1&0\\0&1\\\end{pmatrix}", True, "spaces"),
    (r"3\sqrt{13}", r"3 \sqrt{13}", True, "spaces"),
    (r"11\sqrt2", r"11\sqrt{2}", True, "an argument without braces"),
    (r"\cot x", r"\cot{x}", True, "an argument without braces"),
    ("x^5 - x^4", "x^{5}-x^{4}", True, "arguments without braces"),
    ("x^{12}", "x^{1}2", False, "another power"),
    ("-5", "−5", True, "the minus sign of Unicode"),
    ("5", "-5", False, "the sign"),
    ("5", "(5)", True, "brackets"),
    ("5", "{5}", True, "braces"),
    ("5", r"\(5\)", True, "a formula"),
    ("5", "$5$.", True, "a formula"),
    ("5", r"\text{5}", True, "text"),
    (".35625", "0.35625", True, "no zero before the point"),
    ("p - q", "q-p", False, "another difference"),
    ("x \\le 5", "x \\leq 5", True, "another name of the sign"),
    ("x \\le 5", "x < 5", False, "another relation"),
    ("5", "", False, "no answer"),
    ("7", r"__import__('os')._exit(3)", False, "code"),
]
CASES += [
    ("math", answer, rf"So \boxed{{{stated}}}.", accepted, reason) for answer, stated, accepted, reason in FORMULAS
]
CASES += [
    # ---- MATH, lenient
    ("math lenient", "5", "The answer is: **5**", True, "bold"),
    ("math lenient", "5", "**The answer is:** 5.", True, "bold"),
    ("math lenient", "5", "**Answer:** $5$", True, "bold"),
    ("math lenient", "5", "The answer is 5, because 2 + 3 = 5.", True, "the reason does not count"),
    ("math lenient", "1,2", "The answer is 1, 2.", True, "a list"),
    ("math lenient", "5", "The answer is 5. I am sure of 3.", True, "the sentence ends"),
    ("math lenient", "1.5", "The answer is 1.5.", True, "a point is no full stop"),
    ("math lenient", r"\text{(C)}", "The answer is (C).", True, "a choice"),
    ("math lenient", "x^2", "The answer is: $x^2$, as above", True, "a formula"),
    ("math lenient", "5", r"The answer is \boxed{5}, not 3.", True, "the box"),
    ("math lenient", "6", "The answer is 5 or 6.", False, "two answers"),
    ("math lenient", "1", "So it is 1e999999999", False, "an exponent too large to compute"),
    ("gsm8k lenient", "1", "So it is 1.0e-99999", False, "an exponent too large to compute"),
]


@pytest.mark.parametrize(("reward", "answer", "text", "accepted", "reason"), CASES)
def test_a_careful_reader_would_decide_the_same(reward, answer, text, accepted, reason):
    assert REWARDS[reward]([{"answer": answer}], [Completion(text)]) == [float(accepted)], reason


@has_math_verify
@pytest.mark.slow
@pytest.mark.parametrize("lenient", [False, True])
def test_math_verify_decides_no_case_otherwise(lenient):
    cases = [case for case in CASES if case[0] == ("math lenient" if lenient else "math")]
    options = {"arguments": {"lenient": lenient}, "chunk": 1, "workers": 1, "deadline": 5.0, "budget": 300.0}
    with Grader("grpo_jax.rewards.builtin:math_answer", **options) as grader:
        graded = grader([{"answer": answer} for _, answer, *_ in cases], [Completion(text) for _, _, text, *_ in cases])
    decided = [reward == 1.0 for reward in graded]  # None if sympy needs too long
    assert [case for case, accepted in zip(cases, decided, strict=True) if accepted != case[3]] == []


# ---- parts


NUMBERS = [
    ("1,000", "1000.0", True),
    ("-$1,234.50", "-1234.5", True),
    ("$-5", "-5", True),
    ("50%", "50", True),
    ("1/2", "0.5", True),
    (".5", "0.50", True),
    ("1e3", "1000", True),
    ("18.", "18", True),
    ("−3", "-3", True),
    ("3", "-3", False),
    ("1,2", "12", False),
    ("1/0", "1/0", False),
    ("18 apples", "18", False),
    ("0.30000000000000004", "0.3", False),
    ("1e999999999", "1", False),
    ("9" * 100_000, "9", False),
    ("", "", False),
    ("nan", "nan", False),
]


@pytest.mark.parametrize(("stated", "expected", "same"), NUMBERS)
def test_numbers_are_compared_as_numbers(stated, expected, same):
    assert answers.same_number(stated, expected) is same


LAST_NUMBERS = [
    ("about 1e999999999.", "1e999999999"),
    ("10-5", "5"),
    ("it fell to -5 degrees", "-5"),
    ("costs -$5.25!", "-$5.25"),
    ("x2 and v1.5", None),
    ("a total of 1,234,567 eggs", "1,234,567"),
    ("(1,2)", "2"),
    ("about 1e3 of them", "1e3"),
    ("then -2.5E-3.", "-2.5E-3"),
    ("the colour 1e3f", "1"),
    ("", None),
]


@pytest.mark.parametrize(("text", "number"), LAST_NUMBERS)
def test_last_number(text, number):
    assert answers.last_number(text) == number


PLACES = [
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", r"\frac{1}{2}"),
    (r"\boxed{1} or \boxed{2}", "2", "2"),
    (r"\boxed{\left\{ x \right.}", r"\left\{ x \right.", r"\left\{ x \right."),
    (r"\boxed 15$", "15", "15"),
    (r"\fbox{7}", "7", "7"),
    (r"\boxed{1} then \boxed{2", None, "2"),
    ("The answer is 5. I am sure of 3.", None, "5"),
    ("The answer is: $x^2$, as above", None, "x^2"),
    ("so $x=1$ and $y=2$, twice 3", None, "y=2"),
    (r"it costs $\$36$ now", None, r"\$36"),
    ("$$a$$", None, "a"),
]


@pytest.mark.parametrize(("text", "boxed", "stated"), PLACES)
def test_where_a_formula_is_found(text, boxed, stated):
    assert answers.boxed_answer(text) == boxed
    assert answers.stated_answer(text) == stated


def test_equal_answers_are_equal_votes():
    numbers = [builtin.number_vote({}, Completion(text)) for text in ("#### 18", "It is $18.", "#### 18\n6", "none")]
    assert numbers == [Fraction(18), Fraction(18), Fraction(18), None]
    formulas = [r"\boxed{\dfrac12}", "The answer is 0.5.", r"\boxed{50\text{ cm}/100}", "none"]
    votes = [builtin.formula_vote({}, Completion(text)) for text in formulas]
    assert votes[:2] == [Fraction(1, 2)] * 2
    assert votes[3] is None


# ---- published solutions


@needs_data
@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "test"])
@pytest.mark.parametrize("reward", ["gsm8k", "gsm8k lenient", "gsm8k official"])
def test_gsm8k_solutions_are_right_and_others_wrong(reward, split):
    solutions = [row["answer"] for row in read_lines(DATA / f"gsm8k/{split}.jsonl")]
    assert len(solutions) == {"train": 7473, "test": 1319}[split]
    examples = [{"answer": solution} for solution in solutions]
    texts = [Completion(solution) for solution in solutions]
    assert REWARDS[reward](examples, texts) == [1.0] * len(solutions)
    numbers = [float(solution.rpartition("#### ")[2].replace(",", "")) for solution in solutions]
    equal = [float(a == b) for a, b in zip(numbers, [*numbers[1:], numbers[0]], strict=True)]
    assert REWARDS[reward](examples, [*texts[1:], texts[0]]) == equal
    assert sum(equal) < 0.02 * len(equal)


@needs_data
@pytest.mark.parametrize("reward", ["math", "math lenient"])
def test_math500_solutions_are_right_and_others_wrong(reward):
    expected = [row["answer"] for row in read_lines(DATA / "math500/math500_prompt_answer.jsonl")]
    # The file repeats the answer behind the solution.
    solved = read_lines(DATA / "math500/math500_with_solutions.jsonl")
    solutions = [row["answer"].rpartition("The answer is:")[0] for row in solved]
    examples = [{"answer": answer} for answer in expected]
    assert REWARDS[reward](examples, list(map(Completion, solutions))) == [1.0] * 500
    others = [Completion(rf"\boxed{{{answer}}}") for answer in (*expected[1:], expected[0])]
    assert sum(REWARDS[reward](examples, others)) == 3  # neighbours that are equal: 7 and 7, 3 and 3, 5 and x=5
    if reward == "math lenient":
        for stated in ("The answer is {}", "Hence ${}$.", "The answer is: **{}**"):
            texts = [Completion(stated.format(answer)) for answer in expected]
            assert REWARDS[reward](examples, texts) == [1.0] * 500


# ---- texts that could take for ever

PIECES = [" ", "1", "1,", "1,111", r"1\,111", "1{,}", ".", "-", "/", "$", r"\$", "{", "(", r"\text{", r"\frac1"]
PIECES += ["#### ", r"\boxed{", "answer is ", " or ", "1 or ", "e9", "*", "**", "_", "\\", "x=", "1 1/", "½", "²", "\n"]


@pytest.mark.parametrize("reward", REWARDS)
def test_long_texts_take_time_in_proportion(reward):
    started = time.process_time()
    for start in ("", "#### 1", r"\boxed{1"):
        for piece in PIECES:
            REWARDS[reward]([{"answer": "5"}], [Completion(f"{start}{piece * (20_000 // len(piece))}x")])
    assert time.process_time() - started < 30  # a second or two; 20,000² steps would take an hour
