"""What tests on a GPU share."""

import pytest
import torch

CUDA = torch.device("cuda:0")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
