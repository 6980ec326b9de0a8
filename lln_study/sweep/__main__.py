"""One job in a process of its own: its kind, what to do and where, as JSON."""

from __future__ import annotations

import json
import sys

from lln_study.sweep.job import Place, run
from lln_study.train.runfolder import held


def main(text: str) -> None:
    """Run the job that :func:`lln_study.sweep.plan.Job.command` has written down."""
    job = json.loads(text)
    place = Place.from_json(job["place"])
    with held(place.folder):  # a sweep that is killed leaves this process, its rerun starts another
        run(job["kind"], job["spec"], place)


if __name__ == "__main__":
    main(sys.argv[1])
