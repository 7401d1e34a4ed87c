"""LoRA for eventloop, on peft: adapters alone are trained and saved."""

from eventloop_lora.plugin import Lora

__all__ = ["Lora"]
