"""Methods whose clients train locally and send an update: FedAvg and its kin."""
