"""The same load on mqlayer and on its peers, side by side: `python -m bench.peers [NAME …] [--messages N]`.

One module per peer. The runner starts servers on free ports in a temporary directory and runs a peer's clients in
processes of their own, with the peer's packages in an environment of their own outside the tree.
Modules that a client imports use nothing of mqlayer and nothing of third parties at their top.
"""
