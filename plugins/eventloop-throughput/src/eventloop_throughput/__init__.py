"""How fast eventloop trains: samples, tokens and steps a second, waiting for data, MFU, memory."""

from eventloop_throughput.flops import ForwardFlops
from eventloop_throughput.peaks import peak_tflops
from eventloop_throughput.plugin import Throughput
from eventloop_throughput.window import Amounts, Window

__all__ = ["Amounts", "ForwardFlops", "Throughput", "Window", "peak_tflops"]
