"""Composer's 28 algorithms, each with a model and data that suit it, for its trainer and for ours.

Annotations are evaluated here: Composer reads those of the function that it registers.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eventloop_composer.importing import import_composer

import_composer()

import composer.algorithms as algorithms  # noqa: E402
from composer import Trainer as ComposerTrainer  # noqa: E402
from composer.algorithms.alibi.attention_surgery_functions.utils import (  # noqa: E402
    policy_registry,
    register_alibi,
)
from composer.models import ComposerClassifier, ComposerModel, HuggingFaceModel  # noqa: E402
from torchvision.datasets import VisionDataset  # noqa: E402
from torchvision.models.resnet import Bottleneck, ResNet  # noqa: E402
from torchvision.transforms import ToTensor  # noqa: E402

import eventloop_testing.case  # noqa: E402
from eventloop_composer import Trainer  # noqa: E402
from eventloop_composer.mirror import DeviceAccelerator  # noqa: E402

NUM_SAMPLES = 24
BATCH = 8
SEED = 17


def cnn() -> ComposerClassifier:
    """A convolutional network with what algorithms look for: norms, pooling, dropout."""
    layers = [
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 10),
    ]  # fmt: skip
    return ComposerClassifier(nn.Sequential(*layers), num_classes=10)


def resnet() -> ComposerClassifier:
    """A ResNet of bottlenecks, the only blocks that stochastic depth knows."""
    network = ResNet(Bottleneck, [1, 1, 1, 2], num_classes=10, width_per_group=4)
    return ComposerClassifier(network, num_classes=10)


class Attention(nn.Module):
    """Causal attention of two heads, with a bias where one is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns what each token takes of those before it."""
        length = hidden.shape[1]
        queries, keys, values = (
            one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.project(hidden).chunk(3, -1)
        )
        mask = torch.full((length, length), float("-inf"), device=hidden.device).triu(1)
        if "alibi" in self._buffers:
            mask = mask + self.alibi[..., :length]
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return found.transpose(1, 2).flatten(2)


@policy_registry.register(Attention)
def with_alibi(
    module: torch.nn.Module, module_index: int, max_sequence_length: int
) -> torch.nn.Module:
    """Adds the bias, as Composer documents it for attention of one's own."""
    return register_alibi(module, 2, max_sequence_length, causal=True)


class Decoder(ComposerModel):
    """A language model of one layer.

    Composer's own surgery is for BERT and GPT-2, of which it reads what transformers 5 has no more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(64, 16), Attention()
        self.predict = nn.Linear(16, 64)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns logits for each token."""
        hidden: Tensor = self.embed(batch["input_ids"])
        logits: Tensor = self.predict(hidden + self.attend(hidden))
        return logits

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Returns the loss of the next token."""
        return nn.functional.cross_entropy(
            outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Returns none."""
        return {}

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Returns the outputs."""
        return self(batch) if outputs is None else outputs


def bert() -> HuggingFaceModel:
    """A BERT of two layers, made from its configuration."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    # The attention that alibi changes, and that a newer version would choose otherwise.
    config._attn_implementation = "eager"
    return HuggingFaceModel(BertForSequenceClassification(config), use_logits=True)


def gpt2() -> HuggingFaceModel:
    """A GPT-2 of two layers, made from its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    config._attn_implementation = "eager"
    return HuggingFaceModel(GPT2LMHeadModel(config), use_logits=True)


def tensors() -> Dataset[Any]:
    """Images of 16 x 16 pixels, as tensors."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(NUM_SAMPLES, 3, 16, 16, generator=generator)
    return TensorDataset(pixels, torch.randint(10, (NUM_SAMPLES,), generator=generator))


def halves() -> Dataset[Any]:
    """The same with two classes, for the model that takes the place of any other."""
    pixels, _ = tensors().tensors  # type: ignore[attr-defined]
    return TensorDataset(pixels, torch.arange(NUM_SAMPLES) % 2)


class Pictures(VisionDataset):
    """The same as pictures, for transforms of data sets."""

    def __init__(self) -> None:
        super().__init__("", transform=ToTensor())
        pixels = [(one * 255).byte().permute(1, 2, 0).numpy() for one, _ in tensors()]  # type: ignore[attr-defined]
        self.samples = [Image.fromarray(one) for one in pixels]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> tuple[Any, int]:
        assert self.transform is not None
        return self.transform(self.samples[idx]), idx % 10


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences of 16 tokens.

    Args:
        is_causal: whether each token is a target, not a class of the whole.
    """

    def __init__(self, is_causal: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(64, (NUM_SAMPLES, 16), generator=generator)
        self.is_causal = is_causal

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        tokens = self.tokens[idx]
        labels = tokens if self.is_causal else torch.tensor(idx % 3)
        mask = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@dataclass(frozen=True)
class Case:
    """An algorithm with what it is trained on.

    Args:
        make: makes the algorithms anew.
        model, data: make model and data set.
        arguments: of the trainer.
    """

    make: Callable[[], list[Any]]
    model: Callable[[], Any] = cnn
    data: Callable[[], Dataset[Any]] = tensors
    arguments: dict[str, Any] = field(default_factory=dict)


def _case(
    name: str, model: Any = cnn, data: Any = tensors, *, trainer: Any = None, **given: Any
) -> Case:
    def make() -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some warn that a resumed run isn't theirs to promise
            return [getattr(algorithms, name)(**given)]

    return Case(make, model, data, trainer or {})


def texts() -> Texts:
    """Sequences with a class each."""
    return Texts(is_causal=False)


def causal_texts() -> Texts:
    """Sequences whose tokens are targets."""
    return Texts(is_causal=True)


LONG = {"max_duration": "4ep"}
CASES = {
    "Alibi": _case("Alibi", Decoder, causal_texts, max_sequence_length=32),
    "AugMix": _case("AugMix", data=Pictures),
    "BlurPool": _case("BlurPool", min_channels=2),
    "ChannelsLast": _case("ChannelsLast"),
    "ColOut": _case("ColOut"),
    "CutMix": _case("CutMix"),
    "CutOut": _case("CutOut"),
    "EMA": _case("EMA", half_life="3ba"),
    "Factorize": _case("Factorize", min_channels=8, min_features=8, latent_features=4),
    "GatedLinearUnits": _case("GatedLinearUnits", bert, texts),
    "GhostBatchNorm": _case("GhostBatchNorm", ghost_batch_size=2),
    "GradientClipping": _case("GradientClipping", clipping_type="norm", clipping_threshold=0.1),
    "GyroDropout": _case("GyroDropout", sigma=4, tau=2),
    "LabelSmoothing": _case("LabelSmoothing"),
    "LayerFreezing": _case("LayerFreezing", trainer=LONG, freeze_start=0.1),
    "LowPrecisionGroupNorm": _case("LowPrecisionGroupNorm"),
    "LowPrecisionLayerNorm": _case("LowPrecisionLayerNorm", bert, texts),
    "MixUp": _case("MixUp"),
    "NoOpModel": _case("NoOpModel", data=halves),
    "ProgressiveResizing": _case("ProgressiveResizing", trainer=LONG),
    "RandAugment": _case("RandAugment", data=Pictures),
    "SAM": _case("SAM"),
    "SWA": _case("SWA", trainer=LONG, swa_start="0.3dur", swa_end="0.8dur"),
    "SelectiveBackprop": _case("SelectiveBackprop", start=0.0, end=1.0),
    "SeqLengthWarmup": _case(
        "SeqLengthWarmup",
        gpt2,
        causal_texts,
        duration=0.8,
        min_seq_length=4,
        max_seq_length=16,
        step_size=4,
    ),
    "SqueezeExcite": _case("SqueezeExcite", min_channels=8, latent_channels=4),
    "StochasticDepth": _case(
        "StochasticDepth",
        resnet,
        target_layer_name="ResNetBottleneck",
        drop_rate=0.5,
        drop_warmup="0.3dur",
    ),
    "WeightStandardization": _case("WeightStandardization"),
}
# Beside the 28: other ways through the same algorithms.
MORE = {
    "none": Case(list),
    "MixUp, interpolated loss": _case("MixUp", interpolate_loss=True),
    "CutMix, interpolated loss": _case("CutMix", interpolate_loss=True),
    "SAM, every second step": _case("SAM", interval=2),
    "SWA with its own rate": _case("SWA", trainer=LONG, swa_start="0.3dur", schedule_swa_lr=True),
    "ColOut of the data set": _case("ColOut", data=Pictures, batch=False),
    "GPT-2": Case(list, gpt2, causal_texts),
    "BERT": Case(list, bert, texts),
}


def device_for(kind: Callable[..., Any]) -> Any:
    """Returns the CPU, or under `--device pretend` that, of which Composer's own trainer has no object."""
    if eventloop_testing.case.default_device == "cpu":
        return "cpu"
    return DeviceAccelerator(torch.device("pretend", 0)) if kind is ComposerTrainer else "gpu"


def trainer_of(kind: Callable[..., Any], case: Case, **given: Any) -> Any:
    """Returns a trainer of Composer's kind for a case; the model is drawn from one seed."""
    torch.manual_seed(SEED)
    model = case.model()
    values = {
        "model": model,
        "train_dataloader": DataLoader(case.data(), batch_size=BATCH, shuffle=True),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "max_duration": "2ep",
        "algorithms": case.make(),
        "seed": SEED,
        "device": device_for(kind),
        "precision": "fp32",
        "progress_bar": False,
    }
    return kind(**values | case.arguments | given)


def ours(**given: Any) -> Any:
    """Returns our trainer of a model of Composer's, without the plugins that happen to be installed."""
    return Trainer(settings={"autoload": False} | given.pop("settings", {}), **given)


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """Returns copies of a trainer's weights and buffers, on the host."""
    return {name: one.cpu().clone() for name, one in trainer.state.model.state_dict().items()}


def trained(kind: Callable[..., Any], case: Case, **given: Any) -> dict[str, Tensor]:
    """Returns the weights that a trainer of Composer's kind ends with."""
    trainer = trainer_of(kind, case, **given)
    try:
        trainer.fit()
        return weights_of(trainer)
    finally:
        trainer.close()
