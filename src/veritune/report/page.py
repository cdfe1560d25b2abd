"""The report's page: panels, tables and examples put into the template, and everything written."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from veritune import __version__
from veritune.core.errors import CheckpointError, ConfigError
from veritune.core.statistics import NOTHING
from veritune.report import tables
from veritune.report.collect import Run, Setting, collect_settings, setting_estimate, visible
from veritune.report.examples import choose_pairs, choose_siblings, outcome_counts, pair_up
from veritune.report.figures import render
from veritune.report.panels import MOST_POINTS, Comparison, Panel, compare_settings, make_panels
from veritune.report.remarks import best_setting, run_remarks, setting_remarks

MOST_PAIRS = 5


@dataclass(frozen=True)
class Picture:
    """A drawn panel."""

    panel: Panel | Comparison
    png: bytes

    @property
    def address(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def write_page(runs: Sequence[Path], output: Path) -> Path:
    """See `veritune.report.write_report`."""
    if not runs:
        raise ConfigError("runs is empty; a report needs at least one run folder")
    settings = collect_settings(runs)
    comparison = compare_settings(settings)
    panels: list[Panel | Comparison] = [*([comparison] if comparison else []), *make_panels(settings)]
    pictures = [Picture(panel, render(panel)) for panel in panels]
    page = render_page(settings, pictures)
    try:
        (output / "figures").mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            (output / "figures" / f"{picture.panel.name}.png").write_bytes(picture.png)
        aside = output / ".report.html.partial"
        aside.write_text(page, encoding="utf-8")
        aside.replace(output / "report.html")
    except OSError as error:
        raise CheckpointError(f"cannot write the report into {output}: {error.strerror or error}") from error
    return output / "report.html"


def render_page(settings: Sequence[Setting], pictures: Sequence[Picture]) -> str:
    """The whole page as HTML, every text escaped."""
    runs = [run for setting in settings for run in setting.runs]
    loader = PackageLoader("veritune.report", ".")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible_value,
    )
    return environment.get_template("page.html.jinja").render(
        title=title(settings),
        runs=runs,
        settings=settings,
        accuracy=tables.ACCURACY.label,
        nothing=NOTHING,
        steps=tables.validated_steps(settings[0]),
        time=tables.validated_after(settings[0]),
        remarks=remark_groups(settings),
        results=tables.result_table(settings[0]) if len(settings) == 1 else tables.settings_table(settings),
        samples=tables.samples_table(settings),
        runs_table=tables.runs_table(settings) if len(runs) > 1 else None,
        pictures=[picture for picture in pictures if not picture.panel.detail],
        details=[picture for picture in pictures if picture.panel.detail],
        most_points=MOST_POINTS,
        examples=[example_section(setting) for setting in settings],
        difference=tables.difference_table(settings) if len(settings) > 1 else None,
        config=tables.config_table(settings),
        environment=tables.environment_table(runs),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def visible_value(value: object) -> str:
    """What the page shows of a value: its text without what steers; what a macro made consists of such values."""
    return value if isinstance(value, Markup) else visible(str(value))


def title(settings: Sequence[Setting]) -> str:
    """What the runs are: recipe, task, policy, as far as they share them."""
    runs = [run for setting in settings for run in setting.runs]
    recipes = dict.fromkeys(run.recipe for run in runs)
    tasks = dict.fromkeys(tables.shown_value(run.config, "task") for run in runs)
    return f"{', '.join(recipes)} on {', '.join(tasks)}"


def remark_groups(settings: Sequence[Setting]) -> list[tuple[str, list[str]]]:
    """Remarks under the name of what they are about; a lone setting needs no name."""
    groups: list[tuple[str, list[str]]] = []
    if len(settings) > 1:
        finals = {s.label: each for s in settings if (each := setting_estimate(s, "validation_accuracy", last=True))}
        groups.append(("", [text for text in [best_setting(finals)] if text]))
    for setting in settings:
        remarks = list(setting_remarks(setting))
        for run in setting.runs:
            prefix = f"{run.path.name}: " if len(setting.runs) > 1 else ""
            remarks += [prefix + text for text in run_remarks(run)]
        groups.append((setting.label if len(settings) > 1 else "", remarks))
    return [(label, remarks) for label, remarks in groups if remarks]


def example_section(setting: Setting) -> dict[str, object]:
    """The responses to show of a setting, from its first run that has any."""
    run: Run = next((run for run in setting.runs if run.after or run.rollouts), setting.runs[0])
    pairs = pair_up(run)
    return {
        "setting": setting,
        "run": run,
        "counts": outcome_counts(pairs) if pairs else None,
        "pairs": choose_pairs(pairs, MOST_PAIRS),
        "only_before": run.before.responses[:MOST_PAIRS] if run.before and not pairs else (),
        "rollouts": [(batch.step, choose_siblings(batch)) for batch in run.rollouts],
    }
