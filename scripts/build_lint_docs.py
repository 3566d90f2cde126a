"""Write docs/lint.md from the rules of `podtune lint` and their examples.

python scripts/build_lint_docs.py
"""

from pathlib import Path

from podtune.cluster.lint.explain import reference

TARGET = Path(__file__).resolve().parents[1] / "docs/lint.md"

if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(reference(), encoding="utf-8")
    print(TARGET)
