"""Writes the dashboards and the alert rules: `.venv/bin/python -m baton.observability`."""

from pathlib import Path

from baton.observability.alerts import rules_text
from baton.observability.dashboards import DASHBOARDS

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "observability"
BOARDS = FOLDER / "grafana" / "dashboards"
RULES = FOLDER / "prometheus" / "alerts.yaml"


def files() -> dict[Path, str]:
    """Each generated file with its text."""
    return {BOARDS / board.file_name: board.text for board in DASHBOARDS} | {RULES: rules_text()}


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
