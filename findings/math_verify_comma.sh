#!/bin/bash
# math-verify 0.9.0: a comma in the words between two \boxed{} decides whether a corrected answer counts as right.
#
# Of an answer that is revised, the last box is expected to count. It does, unless fewer than 70 characters lie between the
# boxes, with a comma, "and" or "or" among them: then both are read as one set, which equals neither number. Seen: where 2 is
# asked for, "It is \boxed{1}. No: it is \boxed{2}." is right, and with "No, it is" it is wrong. A reward thus punishes a
# model that corrects itself in ordinary English, and by chance only. With $ around the boxes it does not happen. Way round:
# cut the text down to its last box before parse.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check math-verify==0.9.0 latex2sympy2_extended==1.11.0 \
    antlr4-python3-runtime==4.13.2 sympy==1.14.0
cat >"$folder/program.py" <<'P'
import sys
from math_verify import parse, verify

answers = {
    r"It is \boxed{1}. No: it is \boxed{2}.": True,
    r"It is \boxed{1}. No, it is \boxed{2}.": False,
    r"It is \boxed{1}. That has one apple too few. It is \boxed{2}.": True,
    r"It is \boxed{1}. That is wrong, it has one apple too few. It is \boxed{2}.": False,
    r"It is $\boxed{1}$. No, it is $\boxed{2}$.": True,
}
is_as_ever = True
for answer, expected in answers.items():
    read = parse(answer)
    is_right = verify(parse("$2$"), read)
    print(f"math-verify 0.9.0, {answer!r}: read as {read[0]}, {'right' if is_right else 'wrong'}")
    is_as_ever &= is_right == expected
sys.exit(not is_as_ever)
P
cd "$folder"
"$folder/venv/bin/python" program.py
