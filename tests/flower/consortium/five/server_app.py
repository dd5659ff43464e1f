"""CP-NTK-FL with five clients; the weights it ends with are written to a file."""

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from ntkfl.flower import Shuffler, Strategy
from ntkfl.methods import CPNTKFL
from tests.flower.test_consortium import FIVE, PRIVACY, net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    through = Shuffler(str(context.run_config["folder"]))
    sampling = {"min_train_nodes": FIVE, "min_available_nodes": FIVE, "fraction_evaluate": 0.0}
    strategy = Strategy(CPNTKFL(), net(), privacy=PRIVACY, through=through, **sampling)
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=1, timeout=300)
    save_file(dict(result.arrays.to_torch_state_dict()), Path(str(context.run_config["out"])))
