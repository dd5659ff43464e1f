"""Other people's methods that ntkfl is compared with: each a file, named in a configuration as a user's own method is,
`name = "ntkfl_experiments.rivals.fedpm:FedPM"`.
"""
