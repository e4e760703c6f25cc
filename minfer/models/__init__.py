"""Decoders on minfer's functions: configs, weights, one model, and a loop that serves requests ([decoder.md]). Start at
`model.py`.

[decoder.md]: ../../docs/decoder.md"""
