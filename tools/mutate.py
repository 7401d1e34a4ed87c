"""Makes mistakes in the sources, one at a time, and runs the tests that should find each.

    python tools/mutate.py [NAME ...] [--list]

Each mutant is a line of `src` written another way, and the test file nearest to it. A mutant is detected if
these tests fail on it, in a copy of the sources; the exit status is 1 if fewer than 95 % are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LEAST_DETECTED = 0.95


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
        path: of the file, below `src/eventloop`.
        old: what stands there, once.
        new: what is written instead.
        tests: that should fail, below `tests`.
    """

    path: str
    old: str
    new: str
    tests: str


MUTANTS = {
    "adapters are loaded into another model": Mutant(
        "checkpoint/left_out_weights.py",
        "if merged(own_digests) != digest:",
        "if not found:",
        "checkpoint/test_left_out_weights.py",
    ),
    "a weight that changes is left out": Mutant(
        "checkpoint/left_out_weights.py",
        "if known_digests.setdefault(name, digest) != digest:",
        "if not before.setdefault(name, digest):",
        "checkpoint/test_left_out_weights.py",
    ),
    "a run goes on with another teacher": Mutant(
        "run/resume.py", 'manifest, "companions")', 'manifest, "absent")', "test_state_companion.py"
    ),
    "the order of weights doesn't matter to a digest": Mutant(
        "training/weight_digest.py",
        "hashed = _flat_indices(chunk, shape, chunk_offsets).mul_(_MULTIPLIER_A)",
        "hashed = _flat_indices(chunk, shape, chunk_offsets).mul_(0)",
        "training/test_weight_digest.py",
    ),
    "every epoch has one order on several ranks": Mutant(
        "data/sharding.py", "self.seed + self._epoch", "self.seed", "data/test_sharding.py"
    ),
    "ranks begin at the next one's share": Mutant(
        "data/sharding.py",
        "entries[self.rank :: self.num_replicas]",
        "entries[self.rank + 1 :: self.num_replicas]",
        "data/test_sharding.py",
    ),
    "a resumed run saves its batch again": Mutant(
        "loop.py",
        "LoopState(self.is_finished, self._evaluated_at, self._saved_at)",
        "LoopState(self.is_finished, self._evaluated_at, -1)",
        "test_loop_goes_on.py",
    ),
    "the lock accepts another order of callbacks": Mutant(
        "plugin/lock_digests.py",
        'role in ("algorithm", "callback")',
        'role in ("algorithm",)',
        "plugin/test_lock_digests.py",
    ),
    "the last of equal evaluations is the best": Mutant(
        "checkpoint/best.py",
        "not value > self._value",
        "not value >= self._value",
        "checkpoint/test_best.py",
    ),
    "parts of a failed batch join the next": Mutant(
        "training/logged_numbers.py",
        "        self._row = {}\n        self._microbatch_values = {}\n        self._update = 0\n",
        "        self._row = {}\n        self._update = 0\n",
        "training/test_logged_numbers.py",
    ),
    "predict_forward runs outside of autocast": Mutant(
        "training/precision.py", ', "predict_forward")', ")", "training/test_precision.py"
    ),
    "another seed may resume a run": Mutant(
        "run/differences.py", '"run_dir",', '"run_dir", "seed",', "run/test_differences.py"
    ),
    "after_loss isn't called": Mutant(
        "loop.py", "    hooks.after_loss(state)\n", "", "test_loop.py"
    ),
    "the clock advances after batch_end": Mutant(
        "loop.py",
        '        state.clock.end_batch(samples, tokens, seconds)\n        self._stage = "counted"\n\n',
        '        self._stage = "counted"\n        self.hooks.batch_end(state)\n'
        "        state.clock.end_batch(samples, tokens, seconds)\n\n",
        "test_loop.py",
    ),
    "a checkpoint is saved before batch_checkpoint": Mutant(
        "loop.py",
        "            hooks.batch_checkpoint(state)\n"
        '            self._stage = "evaluated"\n'
        "        if hooks.should_checkpoint(state):\n            self._save(state)\n",
        '            self._stage = "evaluated"\n'
        "        if hooks.should_checkpoint(state):\n            self._save(state)\n"
        "        hooks.batch_checkpoint(state)\n",
        "test_loop.py",
    ),
    "an evaluation's draws move the training's": Mutant(
        "training/evaluation.py",
        "torch.no_grad(), kept_generators():",
        "torch.no_grad():",
        "training/test_evaluation.py",
    ),
    "microbatches aren't weighted": Mutant(
        "distributed/processes.py",
        "share = torch.where(weight == 0, 0.0, weight / total)",
        "share = torch.where(weight == 0, 0.0, 1 / len(self._weights))",
        "distributed/test_processes_accumulation.py",
    ),
    "a microbatch's numbers aren't weighted": Mutant(
        "training/logged_numbers.py",
        "products = map(weighted, self.values.values(), weights)\n",
        "weights = [1.0] * len(weights)\n        products = map(weighted, self.values.values(), weights)\n",
        "training/test_logged_numbers_per_task.py",
    ),
    "a reader without workers stops after an error": Mutant(
        "data/map_style.py",
        "return map(batch_of, indices)",
        "return (batch_of(one) for one in indices)",
        "data/test_map_style.py",
    ),
    "a fork ends its parent's workers": Mutant(
        "distributed/process_ends.py",
        "            if worker.is_alive():\n",
        "            if True:\n",
        "distributed/test_process_ends.py",
    ),
    "a sum is averaged over the ranks": Mutant(
        "distributed/data_parallel.py",
        "                row[name] = next(summed) / (self.world_size // self.data_world_size)\n",
        "                row[name] = next(summed) / self.world_size\n",
        "distributed/test_data_parallel.py",
    ),
    "an epoch's loss counts batches, not samples": Mutant(
        "training/running_means.py",
        "            weighted_sum = torch.stack(losses).sum(dtype=self._dtype) * count\n"
        "            total = weighted_sum if total is None else total + weighted_sum\n"
        "            samples += count * len(losses)\n",
        "            weighted_sum = torch.stack(losses).sum(dtype=self._dtype)\n"
        "            total = weighted_sum if total is None else total + weighted_sum\n"
        "            samples += len(losses)\n",
        "training/test_running_means.py",
    ),
    "no checkpoint is saved at the start": Mutant(
        "checkpoint/saver.py",
        "return is_start or is_end or",
        "return is_end or",
        "checkpoint/test_saver.py",
    ),
    "a checkpoint more than asked for is kept": Mutant(
        "checkpoint/retention.py",
        "[:num_newest]",
        "[: num_newest + 1]",
        "checkpoint/test_retention.py",
    ),
    "a time that is reached has passed": Mutant(
        "clock.py",
        "return self._previous[time._idx] >= time.value",
        "return self._now[time._idx] >= time.value",
        "test_clock.py",
    ),
    "losses are looked at a batch late": Mutant(
        "training/bad_loss.py", "AT_A_TIME = 10", "AT_A_TIME = 11", "training/test_bad_loss.py"
    ),
    "algorithms of a run in progress stay out of it": Mutant(
        "config/plugin_flags.py",
        "name in self.begun_with:",
        "name not in self.begun_with:",
        "config/test_plugin_flags.py",
    ),
    "no evaluation at the end of a fit": Mutant(
        "training/evaluation.py",
        "clock.crossed(interval) or clock.reached(state.until)",
        "clock.crossed(interval)",
        "training/test_evaluation.py",
    ),
    "plugins are closed in the order in which they started": Mutant(
        "plugin/order.py", "        impls.reverse()\n", "", "plugin/test_order.py"
    ),
    "a batch that is repeated to pad counts": Mutant(
        "loop.py",
        "NO_SAMPLES if feed.is_padding else count",
        "count",
        "data/test_feed_uneven.py",
    ),
    "a resumed run draws other random numbers": Mutant(
        "run/resume.py", "capture.generators.go_on)", "lambda state: None)", "run/test_resume.py"
    ),
    "gradients are clipped by value before their norm": Mutant(
        "training/gradient_clipping.py",
        '            logged["grad_norm"] = nn.utils.clip_grad_norm_(params, norm)\n'
        "        if value is not None:\n"
        "            nn.utils.clip_grad_value_(params, value)\n",
        "            if value is not None:\n"
        "                nn.utils.clip_grad_value_(params, value)\n"
        '            logged["grad_norm"] = nn.utils.clip_grad_norm_(params, norm)\n',
        "training/test_gradient_clipping.py",
    ),
    "schedulers move after a step that was skipped": Mutant(
        "training/grad_scaling.py",
        '        if stepped:\n            scheduler_step(state, "ba")\n',
        '        scheduler_step(state, "ba")\n',
        "training/test_grad_scaling.py",
    ),
    "a batch that is run again draws on": Mutant(
        "training/auto_microbatch.py",
        "        self._generators.put_back()\n",
        "",
        "training/test_auto_microbatch.py",
    ),
    "numbers are logged half as often": Mutant(
        "config/settings.py",
        'log_interval: Time = Time("10ba")',
        'log_interval: Time = Time("20ba")',
        "config/test_settings.py",
    ),
    "a plugin's generator is the same on all ranks": Mutant(
        "state.py", "'' if is_alike else f'/{self.data_rank}'", "''", "test_state.py"
    ),
}


def survives(mutant: Mutant) -> bool:
    """Returns whether the tests pass with the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "src")
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("*.egg-info"))
        path = sources / "eventloop" / mutant.path
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.path} has {mutant.old!r} {text.count(mutant.old)} times")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-m",
                "",  # nightly ones, too
                "-p",
                "no:cacheprovider",
                f"tests/{mutant.tests}",
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(sources)},
            capture_output=True,
            text=True,
            check=False,
        )
    if ended.returncode not in (0, 1):
        raise SystemExit(ended.stdout + ended.stderr)
    return ended.returncode == 0


def main() -> int:
    """Prints what became of each mutant; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; default: all")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    names = given.names or list(MUTANTS)
    if given.list:
        sys.stdout.writelines(f"{name}\n" for name in names)
        return 0
    survivors = 0
    for name in names:
        lives = survives(MUTANTS[name])
        survivors += lives
        sys.stdout.write(
            f"{'SURVIVES' if lives else 'detected'}  {name}  ({MUTANTS[name].tests})\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{len(names) - survivors} of {len(names)} are detected\n")
    return int(len(names) - survivors < LEAST_DETECTED * len(names))


if __name__ == "__main__":
    sys.exit(main())
