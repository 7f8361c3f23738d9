"""Writes the dashboards and the alert rules: `.venv/bin/python -m baton.lab.dashboards`."""

from pathlib import Path

from baton.lab.dashboards.alerts import rules_object_text, rules_text
from baton.lab.dashboards.dashboards import DASHBOARDS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FOLDER = DEPLOY / "observability"
BOARDS = FOLDER / "grafana" / "dashboards"
RULES = FOLDER / "prometheus" / "alerts.yaml"
RULES_OBJECT = DEPLOY / "kubernetes" / "components" / "monitoring" / "alerts.yaml"


def files() -> dict[Path, str]:
    """Return the text of each generated file."""
    rules = {RULES: rules_text(), RULES_OBJECT: rules_object_text()}
    return {BOARDS / board.file_name: board.text for board in DASHBOARDS} | rules


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
