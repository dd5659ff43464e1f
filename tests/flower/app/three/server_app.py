"""Three runs, one after the other; what each ends with is written to a file."""

from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from ntkfl.flower import Strategy
from tests.flower.cases import THREE

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    for number, (method, make, _, rounds) in enumerate(THREE):
        strategy = Strategy(method, make(), robust=None, fraction_evaluate=0.0)
        result = strategy.start(
            grid,
            ArrayRecord(make().state_dict()),
            num_rounds=rounds,
            timeout=100,
            train_config=ConfigRecord({"case": number}),
        )
        save_file(dict(result.arrays.to_torch_state_dict()), Path(str(context.run_config["out"])) / method.name)
