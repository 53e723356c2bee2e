"""`make records`: on a GPU, make everything in src/rawgrad/recorded/ anew, with the card and the date."""

import json
import sys
import time
from pathlib import Path

import torch

from rawgrad import runtime, scenarios

FOLDER = Path(scenarios.__file__).parent / "recorded"

if __name__ == "__main__":
    if runtime.DEVICE == "cpu":
        sys.exit("records are made on a GPU, and there is none here")
    for name, make in scenarios.GPU_ONLY.items():
        record = {
            "card": torch.cuda.get_device_name(),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "lines": make(),
        }
        (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {'; '.join(record['lines'])}")
