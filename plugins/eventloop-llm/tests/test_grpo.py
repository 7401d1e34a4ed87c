"""What is generated, judged and learnt, and that a run goes on as if it had never stopped."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from grpo_cases import Seen, fit, grpo, prompts_task, trainer_of, wanted

from eventloop import PluginError, hookimpl
from eventloop.cli import main
from eventloop_fsdp import Fsdp
from eventloop_llm.grpo import Grpo
from eventloop_llm.rollouts.policy_losses import advantages_of, policy_loss
from eventloop_testing import check_plugin, counted_waits, isolated_trainer, run_ranks
from eventloop_testing import pretend_device as switched_on

FOLDER = Path(__file__).parents[1]


@pytest.mark.nightly
def test_the_reward_rises(tmp_path):
    """Completions that are better than the others of their prompt become more probable."""
    rewards = []

    def judge(rollouts):
        found = wanted(rollouts)
        rewards.append(float(found.mean()))
        return found

    fit(
        tmp_path,
        grpo(num_generations=8, reward=judge),
        max_duration="60ba",
        checkpoint_interval=None,
    )

    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", ["batch", "in_rollout"])
@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "loss": "grpo"}],
)
def test_a_run_that_ended_goes_on_with_the_same_rollouts_and_bits(tmp_path, place, options):
    """Also one that was killed while it generated: draws depend on batch and prompt."""
    one, two = Seen(), Seen()
    expected = fit(tmp_path / "one", grpo(**options), one)
    fit(tmp_path / "two", grpo(**options), **{place: 3})

    actual = fit(tmp_path / "two", grpo(**options), two)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert two.completions.keys() == {3, 4, 5}
    torch.testing.assert_close(two.completions, {k: one.completions[k] for k in (3, 4, 5)})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_generate_and_learn_what_one_process_does(tmp_path, strategy):
    """A completion's draws follow from its prompt's place in the batch of all ranks."""
    options = {"num_iterations": 2, "beta": 0.1, "loss": "dapo"}
    given = {"shuffle": False, "lr": 1e-3}
    one = Seen()
    expected = fit(tmp_path / "one", grpo(**options), one, **given)

    def train():
        seen, more = Seen(), [Fsdp()] if strategy == "fsdp" else []
        weights = fit(tmp_path / "two", grpo(**options), seen, *more, batch_size=2, **given)
        return weights, seen.completions

    found = run_ranks(train)

    first = [seen[0] for _, seen in found]
    length = max(part.shape[1] for part in first)
    padded = [torch.nn.functional.pad(part, (0, length - part.shape[1])) for part in first]
    joined = torch.stack([part.view(2, 3, -1) for part in padded], 1).flatten(0, 2)
    assert torch.equal(joined, one.completions[0])
    if strategy == "ddp":
        torch.testing.assert_close(found[0][0], expected, rtol=0, atol=2e-5)
    else:
        shards = [weights["lm_head.weight"] for weights, _ in found]
        whole = torch.cat(shards)[: len(expected["lm_head.weight"])]
        torch.testing.assert_close(whole, expected["lm_head.weight"], rtol=0, atol=2e-5)


class Shorter:
    """A reward of another package's."""

    requires = ("grpo",)

    @hookimpl
    def reward(self, state, rollouts):
        return [-0.5 * len(one.split()) for one in rollouts.completions]


@pytest.mark.nightly
def test_rewards_of_other_packages_are_added(tmp_path):
    """Without a function of its own, too; completions become shorter."""
    seen = Seen()

    fit(tmp_path, Grpo(num_generations=8, max_tokens=6), Shorter(), seen, max_duration="40ba")

    lengths = [float((seen.completions[one] > 1).sum(1).float().mean()) for one in (0, 1, 38, 39)]
    assert sum(lengths[2:]) < sum(lengths[:2]) - 1


class Engine:
    """Generates on the host, whatever the model is on."""

    name = "engine"
    requires = ("grpo",)

    @hookimpl
    def rollout(self, state, prompts):
        prompts.to(torch.device("cpu"))
        prompts.completion_ids = torch.full((len(prompts), 2), 4)
        prompts.completion_mask = torch.ones(len(prompts), 2)
        return prompts


def test_what_an_engine_returns_may_be_on_the_host(tmp_path, pretend_device):
    """As that of a server is; the rewards are computed where the model is."""
    seen, options = Seen(), {"num_iterations": 2}

    fit(tmp_path, grpo(**options), Engine(), seen, device="pretend", max_duration="1ba")

    assert seen.completions[0].device == pretend_device
    assert len(seen.losses) == 2


def test_adapters_are_switched_off_for_the_reference(tmp_path):
    """There is no second model; before the first step the divergence from it is 0."""
    from eventloop_llm.lora import Lora

    lora = lambda: Lora(r=2, target_modules=["q_proj", "v_proj"])  # noqa: E731
    options = {"beta": 0.1, "num_iterations": 2}
    with trainer_of(tmp_path / "one", lora(), grpo(**options), max_duration="1ep") as trainer:
        trainer.fit()
        assert "companions" not in trainer.state.manifest
        expected = {n: one.cpu().clone() for n, one in trainer.state.model.state_dict().items()}
    fit(tmp_path / "two", lora(), grpo(**options), in_rollout=2, max_duration="1ep")

    actual = fit(tmp_path / "two", lora(), grpo(**options), max_duration="1ep")

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_rollouts_are_logged_as_a_table(tmp_path):
    """At the interval, with prompts, completions, rewards and advantages."""
    tables = {}

    class Tables:
        name = "tables"

        @hookimpl
        def log_text(self, state, texts, at):
            tables[at.batch] = texts["grpo/rollouts"]

    given = {"max_duration": "5ba", "log_interval": "1ba"}
    with trainer_of(tmp_path, grpo(log_rollouts="2ba"), Tables(), **given) as trainer:
        trainer.fit()

    assert tables.keys() == {2, 4}
    assert tables[2].keys() == {"prompt", "completion", "reward", "advantage"}
    assert [len(column) for column in tables[2].values()] == [3, 3, 3, 3]
    assert all(re.fullmatch(r"\d+( \d+)*", one) for one in tables[2]["completion"])


OPTIONS = {
    "once": {},
    "twice, with a reference": {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 2},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("settings", [{}, {"microbatch_size": 5}], ids=str)
@pytest.mark.parametrize("kind", OPTIONS)
def test_an_accelerator_has_the_bits_of_the_cpu(tmp_path, kind, settings):
    """Completions, too: each is drawn from a generator of its own, which the device has with the host's numbers."""
    options, one, two = OPTIONS[kind], Seen(), Seen()

    expected = fit(tmp_path / "cpu", grpo(**options), one, device="cpu", **settings)
    with switched_on(draws_from_host=True):
        actual = fit(tmp_path / "there", grpo(**options), two, device="pretend", **settings)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert all(
        torch.equal(one.completions[at], found.cpu()) for at, found in two.completions.items()
    )


class Learning:
    """Keeps what the host waits for from the rewards to the end of the step."""

    name = "a-learning"

    def __init__(self, waits):
        self.waits, self.found, self.num = waits, [], 0

    @hookimpl
    def reward(self, state, rollouts):
        self.num = len(self.waits)

    @hookimpl(tryfirst=True)
    def batch_end(self, state):
        self.found += self.waits[self.num :]


@pytest.mark.parametrize("options", [{}, OPTIONS["twice, with a reference"]])
def test_what_is_learnt_from_completions_reads_nothing(tmp_path, pretend_device, options):
    """The host reads what is generated; from then on it waits for nothing."""
    with counted_waits() as waits:
        learning, plugin = Learning(waits), grpo(**options, log_rollouts=None)
        fit(tmp_path, plugin, learning, device="pretend", checkpoint_interval=None)

    assert waits
    assert learning.found == []


def test_rewards_are_read_for_a_table_that_is_due_alone(tmp_path, pretend_device):
    """The host waits for the device where it reads; a batch otherwise does for what is generated."""
    with counted_waits() as waits:
        fit(tmp_path, grpo(log_rollouts="2ba"), max_duration="3ba", device="pretend")

    table = [one.where for one in waits if "rollouts/rewards.py" in one.where]
    assert len(table) == len(set(table)) == 2, table


MISTAKES = {
    "num_generations=1 is not an int of 2 or more": {"num_generations": 1},
    "loss='ppo' is none of 'grpo', 'dapo', 'dr_grpo'": {"loss": "ppo"},
    "scale_rewards='all' is none of": {"scale_rewards": "all"},
    "epsilon=1.5 isn't in (0, 1)": {"epsilon": 1.5},
    "beta=-1 isn't a finite number": {"beta": -1},
    "beta=nan isn't a finite number": {"beta": float("nan")},
    "epsilon_high=nan isn't a positive number": {"epsilon_high": float("nan")},
    "temperature=inf isn't a positive number": {"temperature": float("inf")},
    "top_p=2 isn't in (0, 1]": {"top_p": 2},
    "temperature=0 isn't a positive number": {"temperature": 0},
    "reward='judge' names no function": {"reward": "judge"},
    "reward=3 is neither a name nor a function": {"reward": 3},
}


@pytest.mark.parametrize("shown", MISTAKES)
def test_options_out_of_range_are_refused(shown):
    """With the values that were seen."""
    with pytest.raises(ValueError, match=re.escape(shown)):
        grpo(**MISTAKES[shown])


@pytest.mark.parametrize(
    ("plugin", "shown"),
    [
        (lambda: grpo(reward=None), "no reward function judges the completions"),
        (lambda: grpo(reward=lambda rollouts: [1.0]), "12 completions have 1 rewards"),
        (lambda: grpo(steps_per_generation=13), "12 completions can't be split into 13 updates"),
    ],
)
def test_what_can_not_be_learnt_from_is_an_error(tmp_path, plugin, shown):
    """With what to write."""
    with trainer_of(tmp_path, plugin()) as trainer, pytest.raises(PluginError, match=shown):
        trainer.fit()


def test_equal_rewards_teach_nothing():
    """A group in which none is better has no advantage, and a step none to clip."""
    advantages = advantages_of(torch.tensor([1.0, 1.0, 0.0, 2.0]), 2)

    torch.testing.assert_close(advantages[:2], torch.zeros(2))
    torch.testing.assert_close(advantages[2:], torch.tensor([-0.7071, 0.7071]), atol=1e-4, rtol=0)
    logps = torch.zeros(4, 3)
    terms = policy_loss(logps, logps, advantages, torch.ones(4, 3))
    assert float(terms.clipped_frac) == 0


@pytest.mark.nightly
def test_it_keeps_the_contract_of_plugins(tmp_path):
    """Options, roles, state and resume, as of every plugin; but to generate waits for the device."""
    options = {"num_generations": 2, "reward": wanted, "max_tokens": 3}

    with pytest.raises(AssertionError) as caught:
        check_plugin(Grpo, role="algorithm", options=options, task=prompts_task)

    problems = re.findall(r"^\d+\. (.*)", str(caught.value), re.MULTILINE)
    assert problems
    assert all("read from the device" in one for one in problems)


@pytest.mark.nightly
def test_the_example_learns(monkeypatch):
    """A few batches of it; the README has the whole."""
    example = runpy.run_path(str(FOLDER / "examples" / "copy_digits.py"))

    means = example["trained"](0, 60)

    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.2


@pytest.mark.nightly
def test_short_answers_goes_on_with_the_model_of_sft(tmp_path):
    """A few batches of the example, on the model and the questions that `chats.py` makes."""
    sft = runpy.run_path(str(FOLDER / "examples" / "chats.py"))
    answers = runpy.run_path(str(FOLDER / "examples" / "short_answers.py"))
    sft["prepare"](tmp_path / "chats")
    task = answers["task"](tmp_path / "chats" / "model", tmp_path / "chats", num_prompts=16)

    with isolated_trainer(tmp_path / "fit", task, max_duration="2ba") as trainer:
        trainer.fit()

    assert trainer.state.clock.batch == 2


def test_a_command_line_has_all_that_is_needed(tmp_path, monkeypatch, capsys):
    """The reward is a function in a file, the tokenizer a folder."""
    (tmp_path / "judge.py").write_text("from grpo_cases import wanted as judge\n")
    (tmp_path / "digits.py").write_text("from grpo_cases import prompts_task as task\n")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)

    status = main([
        "fit", "digits.py", "--grpo.num-generations", "2", "--grpo.reward", "./judge.py:judge",
        "--grpo.max-tokens", "3", "--grpo.log-rollouts", "1ba", "--run-dir", "run",
    ])  # fmt: skip

    assert status == 0, capsys.readouterr().err
    assert [*(tmp_path / "run" / "checkpoints").glob("ba*")]
