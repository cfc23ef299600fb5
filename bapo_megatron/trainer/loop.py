"""The training loop. ``train`` reads like the list in docs/architecture.md."""

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.telemetry.metrics import eval_metrics, step_metrics
from bapo_megatron.trainer.opening import Opening
from bapo_megatron.trainer.records import update_metrics
from bapo_megatron.trainer.run import Run
from bapo_megatron.trainer.stopping import Stopping


def train(config: RunConfig, stopping: Stopping, opening: Opening) -> None:
    """Train from the configuration's start, or from the newest checkpoint, to its last step.

    Every rank calls it. Whatever it starts is ended again, also after an error or an interrupt.

    Raises:
        StoppedError: The run was asked to stop; what there is to save is saved.
    """
    with Run.open(config, stopping, opening) as run:
        run.begin()
        stopping.listen_to_interrupts()
        for step in range(run.progress.finished_steps + 1, config.train.steps + 1):
            with run.timer.phase("rollout"):
                batch = run.next_batch(step)
            lr = run.policy.lr
            with run.timer.phase("training"):
                results = run.trainer.train(batch)
            with run.timer.phase("evaluation"):
                run.complete_evaluation()
            with run.timer.phase("weight_sync"):
                run.push_weights()
            with run.timer.phase("evaluation"):
                evaluated = eval_metrics(run.evaluate_if_due(step))
            metrics = step_metrics(batch, update_metrics(results), lr, run.timer.end_step())
            run.report(metrics, evaluated, results)
            with run.timer.phase("checkpoint"):  # its time is part of the next row
                run.save_if_due(step, evaluated)
        run.finish()
