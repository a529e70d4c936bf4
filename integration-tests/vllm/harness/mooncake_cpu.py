"""Lets vLLM 0.32's MooncakeConnector run without an accelerator: it asks for the accelerator's index and makes it current."""

import torch
from vllm.platforms import current_platform

torch.accelerator.current_device_index = lambda: 0
type(current_platform).set_device = classmethod(lambda cls, device: None)
