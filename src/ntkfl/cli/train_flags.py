"""Options of `ntkfl train`, written by `python -m ntkfl.cli.flags` from the schemas of its settings."""

from ntkfl.cli.flags import Flag

FLAGS = tuple(
    Flag(*row)
    for row in [
        (
            "data.dataset",
            "text",
            "fashion-mnist, mnist, femnist, cifar10, digits, FILE.csv, .parquet or .npz, a folder, or "
            "package.module:function (default fashion-mnist)",
            "Data and clients",
        ),
        ("data.partition", "text", "dirichlet, writer, iid, shards, client (default dirichlet)", "Data and clients"),
        ("data.clients", "integer", "clients in all (default 300)", "Data and clients"),
        (
            "data.alpha",
            "number",
            "Dirichlet concentration, above 0: smaller is more heterogeneous (default 0.1)",
            "Data and clients",
        ),
        (
            "data.reading",
            "text",
            "of the Dirichlet draw: composition or shares (default composition)",
            "Data and clients",
        ),
        ("data.overlap", "switch", "clients may hold the same images, as in the authors' files", "Data and clients"),
        ("data.shards_per_client", "integer", "of partition shards (default 2)", "Data and clients"),
        (
            "data.min_samples",
            "integer",
            "of partition writer: those with fewer samples are left out (default 16)",
            "Data and clients",
        ),
        (
            "data.standardize",
            "switch",
            "inputs to mean 0 and deviation 1 by feature or channel, from sums that clients tell once",
            "Data and clients",
        ),
        ("data.label_column", "text", "of a file: the column of labels; default: label", "Data and clients"),
        (
            "data.client_column",
            "text",
            "of a file: the column that says whose a row is; default: client",
            "Data and clients",
        ),
        ("data.split_column", "text", "of a file: the column of train and test; default: split", "Data and clients"),
        (
            "model.name",
            "text",
            "mlp, cnn, resnet, gru, transformer, random-features, or package.module:factory (default mlp)",
            "Model",
        ),
        (
            "model.backbone",
            "text",
            "package.module:factory of a pretrained network, given the options",
            "A pretrained backbone",
        ),
        ("model.head", "text", "hidden widths of its head, e.g. 128 (default: none, linear)", "A pretrained backbone"),
        ("model.trainable", "text", "what trains, e.g. 'head,layer4.*' (default head)", "A pretrained backbone"),
        ("model.lora", "text", "its linear layers that get adapters, e.g. '*.query'", "A pretrained backbone"),
        ("model.lora_rank", "integer or none", "of adapters; default: 8", "A pretrained backbone"),
        (
            "model.drop",
            "text",
            "the backbone's submodule to leave out, such as its classifier",
            "A pretrained backbone",
        ),
        (
            "model.pool",
            "text",
            "positions of the backbone's output: mean (default), first or flatten",
            "A pretrained backbone",
        ),
        (
            "model.also",
            "text",
            "submodules whose pooled inputs are features too, e.g. 'blocks.6'",
            "A pretrained backbone",
        ),
        ("model.digest", "text", "sha256 that the backbone must have", "A pretrained backbone"),
        ("model.hidden", "text", "hidden widths of an mlp, e.g. 200,100 (default 100)", "Model"),
        ("model.gain", "number or none", "scale of an mlp's first weights; default: the method's, or 1", "Model"),
        ("model.bias", "number or none", "an mlp's first biases; default: the method's, or 0", "Model"),
        (
            "model.convexify",
            "integer or none",
            "features of the network's linearisation, at most; default: the method's, or none",
            "Model",
        ),
        (
            "method.name",
            "text",
            "ntk-fl, cp-ntk-fl, sum-ntk-fl, private-sums, sum-ridge, private-ridge, fedavg, fednova, "
            "fedprox, scaffold, fedadam, fedcom, qsgd, dp-fedavg, data-share, centralized (default ntk-fl), or "
            "package.module:Class",
            "Method",
        ),
        ("method.kernel", "text", "full (the linearised network) or trace (the paper's) (default full)", "Method"),
        ("method.scheme", "text", "flow, descent or paper (default flow)", "Method"),
        ("method.steps", "text", "candidate t: 'paper', '100,200,400' or '100:2000:100'", "Method"),
        (
            "method.average",
            "number",
            "running average of the rounds' weights that is reported and saved; 0: none",
            "Method",
        ),
        ("method.lr", "number", "learning rate", "Method"),
        ("method.local_steps", "integer", "local steps of averaging methods", "Method"),
        ("method.batch_size", "integer", "local batch size", "Method"),
        ("method.loss", "text", "ce, mse, or package.module:name", "Method"),
        ("method.subsample_rate", "number", "β, part of its samples a client uses in a round", "What clients hide"),
        (
            "method.projected_dim",
            "integer or none",
            "d1', features the secret projection leaves; default: none",
            "What clients hide",
        ),
        ("method.sparsity", "number", "part of a Jacobian's smallest values that is left out", "What clients hide"),
        (
            "method.values",
            "text",
            "how the values kept by sparsification travel: float32, float16 or 8bit",
            "What clients hide",
        ),
        ("method.shuffle", "switch", "send replies sealed and in random order through a shuffler", "What clients hide"),
        (
            "method.secure_sum",
            "switch",
            "send replies masked, so that the server learns their sum alone: for methods that need no more",
            "What clients hide",
        ),
        (
            "method.codec",
            "text",
            "how Jacobians are sent: factored, dense, topk (sparsified); auto: topk where sparsity is set "
            "(default auto)",
            "What clients hide",
        ),
        ("rounds", "integer", "communication rounds (default 10)", "Run"),
        ("clients_per_round", "integer", "clients drawn each round, or all where there are fewer (default 20)", "Run"),
        ("seed", "integer", "root of everything random (default 0)", "Run"),
        ("hold_out", "integer", "clients set aside as a validation set (default 0)", "Run"),
        ("stop_at", "number or none", "end once the test accuracy is this", "Run"),
        ("precision", "text", "float32 or float64 (default float32)", "Run"),
        (
            "byzantine",
            "text",
            "clients that corrupt what they reply, KIND:FRACTION[:SCALE], e.g. sign-flip:0.2:5",
            "Run",
        ),
    ]
)
