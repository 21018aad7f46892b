"""One thread for torch: the suite runs one process a core already."""

import torch

torch.set_num_threads(1)
