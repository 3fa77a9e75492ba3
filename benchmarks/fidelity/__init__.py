"""What a state's precision does to a model's predictions over a long text.

    python -m benchmarks.fidelity.train --family=gdn --minutes=2.5      # and mamba2, kda; weights to .runs/fidelity
    python -m benchmarks.fidelity --out=benchmarks/results/fidelity_h200.json

The second command feeds the same tokens to a model with a float32 checkpoint and to the same model under every other policy
(``variants``), and reports the KL divergence of their predictions by position: on held-out text, and on a text that the float32
model wrote itself. ``plot`` draws it. See ``measure`` for what is fed how.

The results in ``benchmarks/results`` are of three models trained at the same time on one GPU, then measured at the same time.
Mamba-2 took the most steps and learned its text by heart: its loss on held-out text is the worst. The 131,072 generated tokens
of Gated DeltaNet and Kimi Delta Attention are of models trained once more, Mamba-2's are 8,192. A checkpoint that is itself a
quantised copy costs more than a copy beside an exact one, and does so from the first thousand tokens on; little is added over
the rest of the text.
"""
