"""A trial's process: a Trainable of Ray Tune that trains the runs of a trial.

A trial's state is its run's folder, not a checkpoint of Tune's. A trial that was paused, lost or resumed continues from that
folder: it reads its earlier results from its journal (file of events) and reports them again, so that a restarted scheduler
gets the same results. A trial of a population that takes over another trial's state continues in a new run, its next
generation.
"""

from __future__ import annotations

import logging

from ray import tune

from springtide.checkpoint import branch
from springtide.checkpoint.format import committed, name_of
from springtide.config import Config
from springtide.elastic.group_sizes import speeds
from springtide.errors import RunExists, SpringtideError, StoreUnavailable, TrainingInterrupted
from springtide.events import Evaluated
from springtide.ray.names import owner_of
from springtide.ray.train.worker_lender import WorkerLender
from springtide.ray.tune.messages import TrialJob, TrialParameters, TrialResult, at_worst, value_of
from springtide.ray.tune.trial_runner import Failed, Finished, ReportWriter, TrialRunner
from springtide.ray.tune.worker_pool import WorkerPoolClient
from springtide.storage import Folder
from springtide.tracking.journal import read_journal
from springtide.tracking.ledger import Prices, costs, ledger
from springtide.tracking.mlflow_client import pass_run_on
from springtide.tune import Generation, member_config, number_of, trial_config, with_takeover

_log = logging.getLogger(__name__)


class Trial(tune.Trainable):
    """A trial as Tune's Trainable. One step in Tune's sense is the training up to the trial's next evaluation."""

    def __repr__(self) -> str:
        """Return this process's name in Ray's dashboard. Ray calls this once, and the process runs one trial after another."""
        return f"{owner_of(self._job.base, is_trial=True)}/trials"

    def setup(self, config: TrialParameters, job: TrialJob) -> None:
        """Prepare the trial; Tune calls this in the trial's process."""
        self._job = job
        self._share = WorkerPoolClient(job.pool)
        self._workers = WorkerLender(self._share, is_trial=True)
        self._reports = ReportWriter(job.report)
        self._take_on(config)

    def _take_on(self, config: TrialParameters) -> None:
        self._number = number_of(str(self.trial_name))  # not from the config, which may be another trial's
        self._spec = config["trial"]
        self._lineage: list[Generation] = []
        self._runner: TrialRunner | None = None
        self._reported, self._last = self._job.settled_step, TrialResult(number=self._number)

    def step(self) -> TrialResult:
        """Wait for the next evaluation; return its metrics, with ``done`` if it is the last.

        The last result is returned only after the run has ended: Tune stops the trial when it gets this result, and if a worker
        were lost just before, the last steps would have to be trained again."""
        try:
            runner = self._runner = self._runner or self._begin()
        except RunExists as held:
            return self._held(held)
        last: Evaluated | None = None
        while True:
            match runner.next():
                case Evaluated() as found if found.step >= runner.config.num_steps:
                    last = found
                case Evaluated() as found:
                    if found.step > self._reported:
                        return self._result(runner, found)
                case Finished() if last is None and self._job.sweep.metric not in self._last:
                    return {**at_worst(self._last, self._job.sweep), "over": True}
                case Finished():
                    return {**(self._result(runner, last) if last else self._last), "done": True, "over": True}
                case Failed(RunExists() as error):
                    return self._held(error)
                case Failed(
                    TrainingInterrupted() | StoreUnavailable() as error
                ):  # Tune retries, and so may a resumed sweep
                    raise error
                case Failed(SpringtideError() as error):  # the error would recur: the trial ends and reports it
                    return {**at_worst(self._last, self._job.sweep), "failed": str(error)[:500]}
                case Failed(error):
                    raise error

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, int]:
        """Save the run's state and stop the run; Tune calls this to pause the trial. Returns the last reported step."""
        self._stop()
        return {"reported": self._reported}

    def load_checkpoint(self, checkpoint: dict[str, int] | None) -> None:
        """Restore the number of the last reported step, so that the trial reports only later steps."""
        self._reported = (checkpoint or {}).get("reported", self._job.settled_step)

    def reset_config(self, new_config: TrialParameters) -> bool:
        """Switch this process to another trial; Tune calls this to reuse the process."""
        self._stop()
        self._take_on(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the run and end its workers; Tune calls this before it ends this process."""
        self._stop()
        self._workers.end()
        self._reports.wait()

    def _stop(self) -> None:
        """Save the run's state and stop the run; the next call of ``step`` continues the run."""
        if self._runner is not None:
            self._runner.stop()
        self._runner = None

    def _begin(self) -> TrialRunner:
        """Start the trial's current run. Raises RunExists if another driver has claimed the sweep."""
        self._job.held.check()
        runner = TrialRunner(self._generation(), self._job.train, self._workers, self._reports)
        self._reported = max(self._reported, branch.first_step(runner.config.train))
        runner.start(decided=self._number in self._job.decided, saved_only=self._job.population)
        return runner

    def _generation(self) -> Config:
        """Return the config of the trial's current run. This is the trial's last run, or a new run that continues from another
        trial's state."""
        job, folder, point = self._job, self._job.held.folder, self._spec["point"]
        self._lineage = folder.lineage(self._number, point)
        if not job.population:
            return trial_config(job.base, job.sweep.budget, self._lineage[-1].run, point)
        of = self._spec.get("of", "")
        if of not in ("", self._lineage[-1].of):
            donor, name = branch.split(of)
            if name in committed(donor):
                before = folder.trials / self._lineage[-1].run
                self._lineage = with_takeover(self._number, self._lineage, point, of)
                folder.write_lineage(self._number, self._lineage)  # before the run starts: a restart reads this
                pass_run_on(
                    before, folder.trials / self._lineage[-1].run
                )  # one MLflow run per trial, over all generations
            else:
                _log.warning("trial %d keeps its own state: the checkpoint %s is gone", self._number, of)
        return member_config(job.base, job.sweep.budget, *self._lineage[-1])

    def _held(self, error: RunExists) -> TrialResult:
        return {**at_worst(self._last, self._job.sweep), "held": str(error)[:500]}

    def _result(self, runner: TrialRunner, found: Evaluated) -> TrialResult:
        config, steps = runner.config, runner.steps
        prices = Prices.set_in(config.track)
        root = Folder(config.run.root)
        books = [ledger(read_journal(root / one.run), prices) for one in self._lineage]
        cost = costs(steps)
        self._reported = found.step
        self._last = {
            "number": self._number,
            "heldout_loss": found.heldout_loss,
            "heldout_bits_per_byte": found.heldout_bits_per_byte,
            "heldout_bits_per_byte_mean": found.mean_bits_per_byte,
            "loss": next((one.loss for one in steps if one.step == found.step), found.heldout_loss),
            "step_worker_s": cost["step_worker_s"],
            "memory_bytes": cost["memory_bytes"],
            "step": found.step,
            "rung": found.step // config.train.eval_every,
            "tokens": config.tokens_after(found.step),
            "worker_s": sum(book.held for book in books),
            "dollars": sum(sum(book.dollars.values()) for book in books),
            "of": self._lineage[-1].of,
            "replayed": found.step <= runner.judged_step,
            "state": f"{runner.folder.url}/checkpoints/{name_of(found.step)}",
        }
        promise = self._job.sweep.promise(value_of(self._last, self._job.sweep.metric))
        self._share.set_score(promise, speeds((one.world_size, one.tokens_per_s) for one in steps))
        return {**self._last, "done": False, "over": False}
