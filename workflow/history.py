"""What was written down before it was looked at, from the history of this repository.

Of each published setting that enters a test of a claim (workflow/claims.py):

seeds      those that were planned in a commit before the first result of this setting was seen.
           Seeds that a later plan added, after results had been seen, are not among them. Where the
           first plan left fewer than three seeds, since it had no more or since the evaluation was
           chosen after a result, a later plan may add new ones until there are three
           (results/plans.md says it of MNIST and of the long runs on the paper's pairs).
tried      how many hyperparameter configurations were tried for this network before its setting
           was fixed; None if that was not recorded. Settings that were chosen for the other arm
           count 0. Settings of a narrower or shorter version of the same network count as many as
           were tried for that version. Settings that were chosen for neither arm, such as those of
           two iterations where three and one are compared, say nothing about either: None.

In the words on seeds, P is a commit with a plan, R one with results, and P < R says that the plan
was the earlier; names of settings were others then.
"""
from typing import NamedTuple


class History(NamedTuple):
    seeds: tuple
    tried: int                     # or None
    about_seeds: str
    about_tried: str


HISTORY = {
    "multimnist": {
        "main/deep": History(
            (0, 1, 2), 22,
            "P 0b1e2cb (0-2) < R e88d638, 15caf31 (0-2; 15caf31 after recon. weight 0.01, "
            "542321e). P 04b0a38 (0-9), after 0-2 seen < R a140a83 (all ten anew; 0-2 differ by"
            " <0.4 points). Captions silent; claims.md and chapter say it since da69143",
            "22 (28b2ca7 docs table; multimnist_capsnet.md l.166; plans.md (17b8afa))"),
        "main/classic": History(
            (), None,
            "R 9a5ba8b (0-2, as main/default) is an ancestor of the first run list ba65f89 "
            "(0-2); README 32f62ae shows commands for seeds 0 1 2 beside results. P 04b0a38 "
            "(0-4) < R b1bf6e2 (0-2, the same numbers), 5dcbd7b (3), 75f41b2 (4)",
            "not recorded (part of 'about 40' of all networks without normalization) (461c839 "
            "(forty against thirteen), 28b2ca7 'networks without normalisation: about 40'; a "
            "few single rows in the recipe, 2d8e130)"),
        "main/adam": History(
            (0, 1, 2), 0,
            "P 0b1e2cb (0-2) < R d376ff8, 15caf31. P 04b0a38 (0-4) < R 75f41b2 (all five anew)."
            " Captions silent",
            "0 of its own (main/deep's, one flag off); rows with --muon 0 are among the 22 "
            "(d8a0707, 542321e recipe)"),
        "main/residual": History(
            (0, 1), 6,
            "P af21999 (0-1) < R d9883f2 (0), edfc3da (0 anew), a140a83 (1)",
            "6 (harder pairs, 160,000 pairs) (28b2ca7 docs table; fe5c771)"),
        "main/paper-protocol": History(
            (0,), 6,
            "as main/paper: P af21999 (0) < R d9883f2 (0: 96.02%). P 04b0a38 (0-1), after 0 "
            "seen < R a140a83 (0 anew: 95.81%), 47a1d37 (1). Captions silent; claims.md says "
            "'the seeds that were planned first'",
            "0 of its own: those of main/residual (6, on harder pairs) (af21999 (RESIDUAL), "
            "28b2ca7)"),
        "main/paper-protocol-long": History(
            (0,), 6,
            "P 3801379 (0; 80 epochs), 055d9ee (32 epochs) < R e944b37 (0). P 0c862b3 (0-2), "
            "after 0 < R 60f313e (1), 41d66bd (2). Seed 3: P ee167b6 < R 19726a0",
            "0 of its own: those of residual (6) (plans.md ee167b6 'Six were tried', validation"
            " pairs of short runs; 28b2ca7)"),
        "weights/paper-protocol-long-recomputed": History(
            (1, 2, 3), 6,
            "e944b37 (seed 0 tested) < P 0a0e695 (0) < R d47138d (0). P 0c862b3 (0-2) < R "
            "60f313e (1), 41d66bd (2). P ee167b6 (3) < R 19726a0",
            "as main/paper-protocol-long"),
        "weights/cnn-paper-protocol-long-recomputed": History(
            (1, 2, 3), 4,
            "P ddccb0d (0), 0c862b3 (0-2) < R 60f313e (0), 01cbad4 (1), 141e67e (2). P ee167b6 (3) < "
            "R b2c6d27",
            "4 (CNN with GAP, harder pairs, 150,000 pairs) (28b2ca7, 0a177c0; 0810d84)"),
        "weights/cnn-paper-protocol-long-tuned-recomputed": History(
            (1, 2, 3), 6,
            "P ee167b6 (1-3, if another setting is better); no result",
            "6: the 4 of cnn-paper-protocol-long and 2 more (plans.md ee167b6, 2d02c11)"),
        "weights/paper-protocol-long-iters-1-recomputed": History(
            (1, 2, 3), 0,
            "P 0c862b3 (0-2) < R c1c8087 (0), 87d7fd0 (1), 85b3f7f (2). P ee167b6 (3) < R "
            "1d30eb0",
            "0 (main/residual's)"),
        "control/iters-1": History(
            (0, 1, 2), 0,
            "P 963dff7, 0b1e2cb (0-2) < R e88d638, 15caf31. P 04b0a38 (0-9) < R 1884d61 (all "
            "ten anew). Captions silent; da69143 says it",
            "0 (main/deep's 22) ('the default network with one setting changed')"),
        "control/cnn": History(
            (0, 1, 2), 3,
            "P 963dff7, 0b1e2cb (0-2) < R e88d638, 15caf31. P 04b0a38 (0-9) < R 1884d61 (all "
            "ten anew). Captions silent",
            "3 (dense head) (28b2ca7 docs table, c103f9d); tuned with 22 it is another row, "
            "control/cnn-tuned (plans.md 17b8afa, 4a8e6b7)"),
        "control/cnn-head-gap": History(
            (0, 1, 2, 3, 4), 0,
            "P fb88917 (0-4) < R cc9153c (0-4), which extends P to 0-9 < R e99c7a5 (5-9). An "
            "earlier plan of the same row as cnn-mean (0-4, 04b0a38) was dropped without "
            "results (4ec915e). Looked at: '0.4 (-0.1 to 0.9), five more are planned'",
            "0 (control/cnn's settings, 3) (chapter l.282; 92e5729; 3d6c9f9 calls them the "
            "CapsNet's lr and Muon step)"),
        "control/cnn-head-gap-tuned": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 22,
            "P 3d6c9f9 (0-9) < R 92e5729. Planned after cnn-head-gap's ten had been seen",
            "22 (3d6c9f9 message and caption; 92e5729)"),
        "control/cnn-tuned": History(
            tuple(range(10)), 22,
            "P ee167b6, 17b8afa (0-9, results/plans.md), before its configurations were tried",
            "22 (results/plans.md)"),
        "control/cnn-gap-decoder": History(
            tuple(range(10)), 3,
            "P 90895d9 (0-9, results/plans.md), before its three weights were tried",
            "3 (results/plans.md), beside the 22 of the same network without a decoder"),
        "control/iters-1-no-recon": History(
            tuple(range(10)), 0,
            "P 17b8afa (0-9, results/plans.md)",
            "0 (main/deep's)"),
        "control/cnn-vectors": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 0,
            "as vectors: P 04b0a38 (0-9) < R a140a83",
            "0 (main/deep's) (2dd49e2 'have the CapsNet's settings')"),
        "control/vector-dense": History(
            (0, 1, 2, 3, 4), 0,
            "P 5d616e7 (0-4) < R 22e63cd (0), 72d0cee (1-3), 71e2cd1 (4)",
            "0 (main/deep's) (2dd49e2)"),
        "control/no-recon": History(
            (0, 1, 2), 0,
            "P 2c22c3d (0-2) < R 0118510. P 04b0a38 (0-4) < R 1884d61 (0-3), 5ec351b (4). "
            "Captions silent. Seeds 0-9 of iters-1 without reconstruction are another row "
            "(17b8afa, no result)",
            "0 (main/deep's) (a row '--recon-weight 0' is among the recipe's tries: c103f9d)"),
        "control/classic-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "P 66c7f2b (0-4) < R d47138d",
            "0 (main/classic's)"),
        "control/residual-iters-1": History(
            (0, 1), 0,
            "as long-iters-1: P af21999 (0), 04b0a38 (0-1) < R 80fc55a (0-1, first results)",
            "0 (main/residual's)"),
        "control/cnn-paper-protocol": History(
            (0, 1), 4,
            "as paper-cnn: P 04b0a38 (0-1) < R 5ec351b (0), 56e3a7e (1)",
            "4 (GAP-CNN on harder pairs, 150,000); none on the paper's pairs (28b2ca7, 0a177c0)"),
        "half-digit/iters-3": History(
            (0, 1, 2), 22,
            "as parts/iters-3: P af21999 (0-2) < R 6b46ff8. P 04b0a38 (0-9) < R 804fe77 (all "
            "ten anew). Captions and chapter silent",
            "0 (main/deep's) (chapter l.321 'its learning rate was not tuned for any of the "
            "four rows'; 6a9e4bb)"),
        "half-digit/iters-1": History(
            (0, 1, 2), 0,
            "as parts/iters-1: P af21999 (0-2) < R 6b46ff8. P 04b0a38 (0-9) < R 804fe77 (all "
            "ten anew). Captions and chapter silent",
            "0 (main/deep's) (chapter l.321 'its learning rate was not tuned for any of the "
            "four rows'; 6a9e4bb)"),
        "half-digit/cnn": History(
            (0, 1, 2), 3,
            "P 1309c61 (0-2) < R 51774aa. P 04b0a38 (0-9), cut to 0-4 in 4ec915e (before any "
            "result of 3+) < R b1bf6e2 (0-4 anew). Captions silent",
            "0 (control/cnn's) (chapter l.321)"),
        "half-digit/cnn-head-gap": History(
            (0, 1, 2), 0,
            "as parts/cnn-mean: P a71f54a (0-2) < R 51774aa. P 04b0a38 (0-9), cut to 0-4 in "
            "4ec915e < R b1bf6e2 (0-3), b97c247 (4). Captions silent",
            "0 (control/cnn's) (chapter l.321; claims.md l.84 'not tuned there')"),
        "half-digit-long/iters-3": History(
            (0, 1, 2, 3, 4), 22,
            "P 5d616e7 (0-4) < R c8dcc46 (0), 3f44b0a (1-2), cc9153c (3), 8be0e23 (4)",
            "0 (main/deep's) (chapter l.321)"),
        "half-digit-long/iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "P 5d616e7 (0-4) < R c8dcc46 (0), 3f44b0a (1-2), cc9153c (3), 8be0e23 (4)",
            "0 (main/deep's) (chapter l.321)"),
    },
    "affnist": {
        "matched-accuracy/capsnet": History(
            (0, 1, 2, 3, 4), 1,
            "as papers/caps: P f944948 (0-4) < R 28ab3ef (0,1), 985e6e9 (2). Cut to 0-2 in "
            "e99d462 (11-23 14:47), when 0-2 were in; back to 0-4 in 04b0a38 < R 1b71b21 (0-4; "
            "0-2 the same numbers). P 5d616e7 (0-7, caption) < R 1491173 (5,6), 5d2b3ec (7)",
            "1 (Adam, lr 1e-3) (4e1acbc 'one try each'; d05ab16; de8ce22)"),
        "matched-accuracy/cnn": History(
            (0, 1, 2, 3, 4), None,
            "P f944948 (0-4) < R 28ab3ef (0), 2419cf5 (1), 985e6e9 (2). Cut to 0-2 in e99d462 "
            "(11-23 14:47), when 0-2 were in; back to 0-4 in 04b0a38 < R 1b71b21. P 5d616e7 < R"
            " 1491173, 5d2b3ec",
            "not recorded; at least 2 (with and without dropout) (4e1acbc (2); de8ce22 "
            "'several; their number was not recorded')"),
        "matched-accuracy/cnn-dense": History(
            (0, 1, 2, 3, 4), 1,
            "P f944948 (0-4) < R 28ab3ef (0), 2419cf5 (1), 985e6e9 (2). Cut to 0-2 in e99d462 "
            "(11-23 14:47), when 0-2 were in; back to 0-4 in 04b0a38 < R 1b71b21. P 5d616e7 < R"
            " 1491173, 5d2b3ec",
            "1 (Adam, lr 1e-3) (4e1acbc 'one try each'; d05ab16; de8ce22)"),
        "matched-accuracy/cnn-64": History(
            (0, 1), None,
            "P a67111e (0-2), dropped without result in eea16f4; P 04b0a38 (0-1) < R 0b69eff "
            "(0,1), which extends P to 0-4; cut to 0-2 in fefe032 < R 801b40b (2). P 5d616e7 "
            "(0-7; caption: 'seeds 3 to 7') < R 3d565c3 (3), 1491173 (4), 5d2b3ec (5-7)",
            "0 (cnn's, wider) (a67111e, 04b0a38 (WIDE_CNN))"),
        "equal-training/capsnet": History(
            (0, 1, 2), 1,
            "as papers-free/caps: P f944948 (0-2) < R 2419cf5 (0), f005a80 (1,2). P 04b0a38 "
            "(0-4) < R 1b30323, 9963010, 1b71b21 (3), a8a7f6d (4); 0-2 the same numbers. "
            "Captions silent",
            "1 (Adam, lr 1e-3) (4e1acbc 'one try each'; d05ab16; de8ce22)"),
        "equal-training/cnn": History(
            (0, 1, 2), None,
            "P f944948 (0-2) < R 2419cf5 (0), bda62f2 (1), f005a80 (2). P 04b0a38 (0-4) < R "
            "a8a7f6d (3), 2dbc97d (4). Captions silent",
            "as matched-accuracy/cnn"),
        "equal-training/cnn-dense": History(
            (0, 1, 2), 1,
            "P f944948 (0-2) < R 2419cf5, bda62f2, f005a80. P 04b0a38 (0-4) < R 2dbc97d (3,4). "
            "Captions silent",
            "1 (Adam, lr 1e-3) (4e1acbc 'one try each'; d05ab16; de8ce22)"),
        "any-position/capsnet": History(
            (0, 1, 2, 3, 4), 1,
            "as papers-anywhere: P 04b0a38 (0-4) < R a8a7f6d",
            "0 (the small networks', chosen for translated digits)"),
        "any-position/cnn": History(
            (0, 1, 2, 3, 4), None,
            "as papers-anywhere: P 04b0a38 (0-4) < R a8a7f6d",
            "0 (the small networks', chosen for translated digits)"),
        "any-position/cnn-dense": History(
            (0, 1, 2, 3, 4), 1,
            "as papers-anywhere: P 04b0a38 (0-4) < R a8a7f6d",
            "0 (the small networks', chosen for translated digits)"),
        "any-position-matched/capsnet": History(
            (0, 1, 2, 3, 4), 1,
            "P 5d616e7 (0-4) < R 88884b5",
            "0 (the small networks')"),
        "any-position-matched/cnn": History(
            (0, 1, 2, 3, 4), None,
            "P 5d616e7 (0-4) < R 88884b5",
            "0 (the small networks')"),
        "backbone/capsnet-shared": History(
            (0, 1, 2, 3, 4, 5, 6), 6,
            "as free/shared: P 99abd8a (0-9) < R 8e8b745 (0), 8f8c23b (1), 2a2216f (2). Cut to "
            "0-2 in e99d462; P 04b0a38 (0-9) < R 8181bbe (0-4 anew); 1c2b85f brings R 5,6 and "
            "cuts P to 0-6 at once: stopped at 7 of 10. Docs since b4bc6ba: 'the last two were "
            "added after the first five'",
            "3 learning rates/steps (a71f54a), without padding, and 3 paddings (e90eb82); "
            "design came from prototypes whose affine test accuracy was known (a71f54a table; "
            "f97f795/a71f54a text; padding.jsonl (e90eb82))"),
        "backbone/cnn-gap": History(
            (0, 1, 2, 3, 4), 6,
            "8 px, as free/gap-8: P 49909a5 (gap at 8 px, 0-9), 5581b9d (0-4) < R 0946605 (0), "
            "2a2216f (1,2). Cut to 0-2 in e99d462; P 04b0a38 (0-9) < R 8181bbe (0-4 anew), "
            "1c2b85f (5,6; cuts P to 0-6). Captions silent",
            "3 learning rates/steps (a71f54a), without padding, and 3 paddings (e90eb82) "
            "(a71f54a; e90eb82)"),
        "backbone/capsnet": History(
            (0, 1, 2, 3, 4), 6,
            "as free/caps: P 99abd8a (0-4) < R 8e8b745 (0), 985e6e9 (1), d3506ae (2). Cut to "
            "0-2 in e99d462 (11-23 14:47), when 0-2 were in; back to 0-4 in 04b0a38 < R 8181bbe"
            " (0-4)",
            "3 learning rates/steps (a71f54a), without padding, and 3 paddings (e90eb82); "
            "published with 4 px, though 8 px were better by 0.1 points on validation (a71f54a;"
            " padding.jsonl; a53b01d)"),
        "backbone/cnn-dense": History(
            (0, 1, 2, 3, 4), 6,
            "as free/dense-8: P e90eb82 (0-4) < R 8181bbe. (4 px: P 99abd8a, R a460d9a ...: "
            "another setting)",
            "3 learning rates/steps (a71f54a), without padding, and 3 paddings (e90eb82) "
            "(a71f54a; e90eb82)"),
        "backbone/vector-gap": History(
            (0, 1, 2, 3, 4), 3,
            "8 px, as free/vectors-8: P e90eb82 (0-4) < R 8181bbe (0-4), which raises P to 0-9 "
            "< R 1c2b85f (5,6), which cuts P to 0-6. Captions silent. (4 px, free/vectors: P "
            "99abd8a 0-4, R 0946605 ...: another setting)",
            "0 learning rates of its own (the backbone's default); 3 paddings (8 px taken) (not"
            " in a71f54a's table; e90eb82)"),
        "backbone/vector-gmp": History(
            (0, 1, 2, 3, 4), 3,
            "as free/vectors-max-8: P e90eb82 (0-4) < R 8181bbe (0), 62f3011 (1-4)",
            "0 learning rates; 3 paddings (e90eb82)"),
        "backbone/cnn-gmp": History(
            (0, 1, 2, 3, 4), 3,
            "as free/max-8: P 5581b9d (0-4) < R 0946605 (0), 2a2216f (1,2). Cut to 0-2 in "
            "e99d462; P 04b0a38 (0-9); 8181bbe brings R 0-4 and cuts P to 0-4 at once",
            "0 learning rates; 3 paddings (not in a71f54a; e90eb82)"),
        "backbone/capsnet-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "as free/caps-1: P 99abd8a (0-9) < R 0946605 (0), 38ff8f3 (1), d3506ae (2). Cut to "
            "0-2 in e99d462; P 04b0a38 (0-4) < R 8181bbe (0-4)",
            "0 (capsnet's)"),
        "components/routing": History(
            (0, 1, 2), 0,
            "as steps/routing: P 99abd8a (0-4) < R 0946605, 4ad5bc3, d3506ae. Cut to 0-2 in "
            "e99d462, when 0-2 were in. 04b0a38: 0-4; a181444: 0-2 < R 94c2c4b (0-2 anew)",
            "0 (backbone/capsnet-shared's)"),
        "components/transformation": History(
            (0, 1, 2), 6,
            "as steps/transformation: P 99abd8a (0-4) < R 0946605, 4ad5bc3, d3506ae. Cut to 0-2"
            " in e99d462, when 0-2 were in. 04b0a38: 0-4; a181444: 0-2 < R 94c2c4b (0-2 anew)",
            "0 (backbone/capsnet-shared's)"),
        "few-10/capsnet-shared": History(
            (0, 1, 2), 6,
            "as few-10/shared: P 99abd8a (0-2) < R 38ff8f3 (0), 91a6ab1 (1), b91682d (2). P "
            "04b0a38 (0-4) < R a34768c (0-4 anew). P 5d616e7 (0-14, caption) < R 8be0e23 (5-14)",
            "0 (backbone/capsnet-shared's)"),
        "few-10/vector-gap": History(
            (0, 1, 2, 3, 4), 3,
            "8 px: P e90eb82 (vectors-8, 0-4) < R a34768c (0-4). With 4 px: P b91682d (0-2) < R"
            " 892b715: another setting, seeds 0-2 seen. P 5d616e7 (0-14, caption) < R 8be0e23 "
            "(5-14)",
            "0 (backbone/vector-gap's)"),
        "few-10/cnn-gap": History(
            (0, 1, 2), 6,
            "8 px: P 49909a5, 5581b9d (gap-8, 0-2) < R 38ff8f3 (0), b91682d (1,2). P 04b0a38 "
            "(0-4) < R a34768c. Captions silent",
            "0 (backbone/cnn-gap's)"),
        "few-10/cnn-gmp": History(
            (0, 1, 2), 3,
            "max-8: P b91682d (0-2) < R 892b715. P 04b0a38 (0-4) < R a34768c. Captions silent",
            "0 (backbone/cnn-gmp's)"),
        "mnist/capsnet-shared": History(
            (0, 1, 2), 0,
            "P 99abd8a (0-2), 5581b9d (0-4) < R 0946605 (0), d3506ae (1,2). Cut to 0-2 in "
            "0ee2b1e, when 0-2 were in. 04b0a38: 0-4; a181444: 0-2 < R 0e44dfc (0-2 anew)",
            "0 (backbone's)"),
        "mnist/capsnet-paper": History(
            (1, 2, 3), None,
            "P 3801379 (0; 30 epochs), 84830d7 (0; 15 epochs) < R 6a3e648 (0: 99.65%). P "
            "0c862b3 (0-2) came AFTER the result of seed 0. plans.md (ee167b6) says 'Three "
            "seeds were planned before seed 0 was trained': the history shows range(1). "
            "Captions silent",
            "not recorded (no try is mentioned) (an earlier mnist/paper, 2 epochs, seed 0: "
            "99.35% (b50bf0d))"),
    },
    "smallnorb": {
        "paper-azimuth/matrix-capsnet": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "as caps: P cef9ceb (0-9, this size) < R 2e47817 (0-4), 8d92f39 (5-9); 2aab896 (all"
            " anew). A larger caps, 4 epochs, P 5678543, had been seen on these toys (R "
            "b231f8e, seed 0,1), dropped in 03a383c",
            "not recorded (de8ce22/6810a06 'not recorded'; cef9ceb: 'about as many tries for "
            "both', on toys 1)"),
        "paper-azimuth/cnn": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P cef9ceb (0-9, lr 2e-3, 16 epochs) < R 5f633ae (0), 2e47817 (1-4), 8d92f39 (5-9);"
            " 2aab896. Other settings seen before: R b231f8e",
            "not recorded (as above)"),
        "paper-azimuth/cnn-bn": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "as cnn-norm: P 04b0a38 (0-9) < R 2aab896",
            "0 (cnn's rate and epochs); docs: not recorded (04b0a38; 2dd49e2)"),
        "paper-azimuth/cnn-dropout": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P d505a65 (0-9) < R 906312d. Caption: planned after the others had been looked at",
            "0 (cnn's) (caption d505a65)"),
        "paper-azimuth/cnn-paper": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P d505a65 (0-9) < R ca8bdb5. Caption as above. "
            "P d99c8b4: the same again, replaced with the hits of every toy",
            "0 (cnn's rate and epochs) (caption d505a65)"),
        "paper-azimuth/matrix-capsnet-paper": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P 0c862b3 (0-9) < R fb8ce1d (0), 8dc0b28 (1), 9e616cc (2), 90ffdc7 (3), e57e24d "
            "(4), 2ba3279 (5), 6423772 (6), 2e691b0 (7-9). (a) moved to it in 2e691b0",
            "0 (matrix-capsnet's) (caption 0c862b3)"),
        "heads-azimuth/capsnet-shared": History(
            (0, 1, 2, 3, 4), 15,
            "as dynamic-shared: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 "
            "(0-9, ten older results). Cut to 0-4 in 04b0a38 < R 5cc8e1d (0-4 anew)",
            "15 ('about 15', toys 1) (b5ec450, 975229f)"),
        "heads-azimuth/capsnet-shared-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "as dynamic-shared-1: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 "
            "(0-9, ten older results). Cut to 0-4 in 04b0a38 < R 5cc8e1d (0-4 anew)",
            "0 (capsnet-shared's)"),
        "heads-azimuth/cnn-gap": History(
            (0, 1, 2, 3, 4), 5,
            "as gap: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 (0-9, ten "
            "older results). Cut to 0-4 in 04b0a38 < R 5cc8e1d (0-4 anew)",
            "5 (none better than plain gap) (b5ec450; one learning rate for both: 975229f)"),
        "heads-azimuth/matrix-head": History(
            (0, 1, 2, 3, 4), None,
            "as em: P 3e49b73 (0-5), f1f38b1 (0-9) < R 338dbc6, a0da8cc, b231f8e (0-9, ten "
            "older results). Cut to 0-4 in 04b0a38 < R 5cc8e1d (0-4 anew)",
            "not recorded (no document names it; chapter: settings chosen with two iterations)"),
        "heads-azimuth/matrix-head-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "as em-1: P 3e49b73 (0-5), f1f38b1 (0-9) < R 338dbc6, a0da8cc, b231f8e (0-9, ten "
            "older results). Cut to 0-4 in 04b0a38 < R 5cc8e1d (0-4 anew)",
            "0 (matrix-head's, with 2 iterations)"),
        "wide-azimuth/capsnet-shared": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 15,
            "as dynamic-shared: P f1f38b1 (0-9) < 7cf144e: R 0-3 and P cut to 0-4 at once; R "
            "de6954a (4). P dc44b00 (0-9 again, after 0-4 seen) < R 03a383c (5-9); 5771151 (all"
            " ten anew). Captions silent. Width chosen: 'on the better of two widths' (45438ff)",
            "15 ('about 15', toys 1) (b5ec450; 45438ff '15 tries against its 5')"),
        "wide-azimuth/cnn-gap": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 5,
            "as gap: P f1f38b1 (0-9) < 7cf144e: R 0-3 and P cut to 0-4 at once; R de6954a (4). "
            "P dc44b00 (0-9 again, after 0-4 seen) < R 03a383c (5-9); 5771151 (all ten anew). "
            "Captions silent. Width chosen: 'on the better of two widths' (45438ff)",
            "5 (b5ec450; 45438ff '15 tries against its 5')"),
        "toys2-azimuth/matrix-capsnet": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys2-azimuth/cnn": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys2-azimuth/capsnet-shared": History(
            (0, 1, 2), 15,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys2-azimuth/cnn-gap": History(
            (0, 1, 2), 5,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys3-azimuth/matrix-capsnet": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys3-azimuth/cnn": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys3-azimuth/capsnet-shared": History(
            (0, 1, 2), 15,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys3-azimuth/cnn-gap": History(
            (0, 1, 2), 5,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-azimuth/matrix-capsnet": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-azimuth/cnn": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-azimuth/capsnet-shared": History(
            (0, 1, 2), 15,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-azimuth/cnn-gap": History(
            (0, 1, 2), 5,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "paper-elevation/matrix-capsnet": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "as caps: P cef9ceb (0-9, this size) < R 2e47817 (0-3), 8d92f39 (4-9); 8859653 (all"
            " anew). A larger caps, 4 epochs, P 5678543, had been seen on these toys (R "
            "b231f8e, seed 0), dropped in 03a383c",
            "not recorded (de8ce22/6810a06 'not recorded'; cef9ceb: 'about as many tries for "
            "both', on toys 1)"),
        "paper-elevation/cnn": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P cef9ceb (0-9, lr 2e-3, 16 epochs) < R 2e47817 (0-4), 8d92f39 (5-9); 8859653. "
            "Other settings seen before: R b231f8e",
            "not recorded (as above)"),
        "paper-elevation/cnn-bn": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "as cnn-norm: P 04b0a38 (0-9) < R 8859653",
            "0 (cnn's rate and epochs); docs: not recorded (04b0a38; 2dd49e2)"),
        "paper-elevation/cnn-dropout": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P d505a65 (0-9) < R 906312d. Caption: planned after the others had been looked at",
            "0 (cnn's) (caption d505a65)"),
        "paper-elevation/cnn-paper": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P d505a65 (0-9) < R ca8bdb5. Caption as above. "
            "P d99c8b4: the same again, replaced with the hits of every toy",
            "0 (cnn's rate and epochs) (caption d505a65)"),
        "paper-elevation/matrix-capsnet-paper": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "P 0c862b3 (0-9) < R fb8ce1d (0), 846bb29 (1), 09e8b3d (2), 8978bf6 (3), e57e24d "
            "(4), 2ba3279 (5), 6423772 (6), 2e691b0 (7-9). (a) moved to it in 2e691b0",
            "0 (matrix-capsnet's) (caption 0c862b3)"),
        "heads-elevation/capsnet-shared": History(
            (0, 1, 2, 3, 4), 15,
            "as dynamic-shared: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 "
            "(0-9, ten older results). Cut to 0-4 in 04b0a38 < R 56e197f (0-4 anew)",
            "15 ('about 15', toys 1) (b5ec450, 975229f)"),
        "heads-elevation/capsnet-shared-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "as dynamic-shared-1: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 "
            "(0-9, ten older results). Cut to 0-4 in 04b0a38 < R 56e197f (0-4 anew)",
            "0 (capsnet-shared's)"),
        "heads-elevation/cnn-gap": History(
            (0, 1, 2, 3, 4), 5,
            "as gap: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 (0-9, ten "
            "older results). Cut to 0-4 in 04b0a38 < R 56e197f (0-4 anew)",
            "5 (none better than plain gap) (b5ec450; one learning rate for both: 975229f)"),
        "heads-elevation/matrix-head": History(
            (0, 1, 2, 3, 4), None,
            "as em: P 3e49b73 (0-5), f1f38b1 (0-9) < R a0da8cc, b231f8e (0-9, ten older "
            "results). Cut to 0-4 in 04b0a38 < R 56e197f (0-4 anew)",
            "not recorded (no document names it; chapter: settings chosen with two iterations)"),
        "heads-elevation/matrix-head-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "as em-1: P 3e49b73 (0-5), f1f38b1 (0-9) < R a0da8cc, b231f8e (0-9, ten older "
            "results). Cut to 0-4 in 04b0a38 < R 56e197f (0-4 anew)",
            "0 (matrix-head's, with 2 iterations)"),
        "wide-elevation/capsnet-shared": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 15,
            "as dynamic-shared: P f1f38b1 (0-9) < 7cf144e: R 0-3 and P cut to 0-4 at once; R "
            "de6954a (4). P dc44b00 (0-9 again, after 0-4 seen) < R 03a383c (5-9); 7aa1aa3 (all"
            " ten anew). Captions silent. Width chosen: 'on the better of two widths' (45438ff)",
            "15 ('about 15', toys 1) (b5ec450; 45438ff '15 tries against its 5')"),
        "wide-elevation/cnn-gap": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 5,
            "as gap: P f1f38b1 (0-9) < 7cf144e: R 0-3 and P cut to 0-4 at once; R de6954a (4). "
            "P dc44b00 (0-9 again, after 0-4 seen) < R 03a383c (5-9); 7aa1aa3 (all ten anew). "
            "Captions silent. Width chosen: 'on the better of two widths' (45438ff)",
            "5 (b5ec450; 45438ff '15 tries against its 5')"),
        "toys2-elevation/matrix-capsnet": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys2-elevation/cnn": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys2-elevation/capsnet-shared": History(
            (0, 1, 2), 15,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys2-elevation/cnn-gap": History(
            (0, 1, 2), 5,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 521b8f9",
            "0 (those of toys 0's rows)"),
        "toys3-elevation/matrix-capsnet": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys3-elevation/cnn": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys3-elevation/capsnet-shared": History(
            (0, 1, 2), 15,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys3-elevation/cnn-gap": History(
            (0, 1, 2), 5,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-elevation/matrix-capsnet": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-elevation/cnn": History(
            (0, 1, 2), None,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-elevation/capsnet-shared": History(
            (0, 1, 2), 15,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "toys4-elevation/cnn-gap": History(
            (0, 1, 2), 5,
            "P 04b0a38 (0-4), cut to 0-2 in 4ec915e before any result < R 40a6cfe",
            "0 (those of toys 0's rows)"),
        "heads-azimuth/capsnet": History(
            (0, 1, 2, 3, 4), None,
            "as dynamic: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 (0-9, ten"
            " older results). Cut to 0-4 in 04b0a38 < R 5cc8e1d (0-4 anew)",
            "not recorded apart (among the 15 of 'the capsules'?) (b5ec450)"),
        "heads-azimuth/capsnet-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "as dynamic-1: P 3e49b73 (0-5), f1f38b1 (0-9) < R 975229f, ad3e089, 338dbc6 (0-9, "
            "ten older results). Cut to 0-4 in 04b0a38 < R 5cc8e1d (0-4 anew)",
            "0 (capsnet's)"),
        "paper-azimuth/matrix-capsnet-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "P 66c7f2b (0-4) < R 960994c",
            "0 (matrix-capsnet's, with 2 iterations) (claims.md 'settings were chosen with two "
            "iterations')"),
        "paper-azimuth/matrix-capsnet-paper-iters-1": History(
            (0, 1, 2, 3, 4), None,
            "P 0c862b3 (0-4) < R 853eb2a (0), 846bb29 (1), 09e8b3d (2), 8978bf6 (3), ad0fd7e "
            "(4)",
            "0 (matrix-capsnet's, with 2 iterations) (0c862b3)"),
        "paper-azimuth/matrix-capsnet-paper-iters-3": History(
            (0, 1, 2, 3, 4), None,
            "P 0c862b3 (0-4) < R 8dc0b28 (0), 9e616cc (1), 90ffdc7 (2), 5376a0d (3), 3897e6a "
            "(4)",
            "0 (matrix-capsnet's, with 2 iterations); 'none was tried' (2e691b0 chapter)"),
        "standard/matrix-capsnet-iters-1": History(
            (0, 1, 2), None,
            "as caps-1: P cef9ceb (0-2) < R ce4d6ae (0.51, 0.51, 0.50); dropped in 7c42014; P "
            "66c7f2b (0-2), result of old code known < R 960994c (anew)",
            "0 (matrix-capsnet's, with 2 iterations) (f6626af)"),
        "standard/matrix-capsnet-iters-3": History(
            (0, 1, 2), None,
            "as caps-3: P 5678543, cef9ceb (0-2, this size) < R ce4d6ae; e32f8c4 (anew)",
            "0 (matrix-capsnet's; 'none tuned for this task') (f6626af)"),
        "standard/matrix-capsnet-iters-2": History(
            (0, 1, 2), None,
            "as caps-2: P 5678543, cef9ceb (0-2, this size) < R ce4d6ae; e32f8c4 (anew)",
            "0 (matrix-capsnet's; 'none tuned for this task') (f6626af)"),
        "gap-shapes/matrix-capsnet": History(
            tuple(range(10)), None,
            "P 6d4424e (0-9) < R 01c5f59",
            "not recorded"),
        "gap-shapes/cnn": History(
            tuple(range(10)), None,
            "P 6d4424e (0-9) < R 01c5f59",
            "not recorded"),
        "gap-shapes/cnn-gap": History(
            tuple(range(10)), None,
            "P 6d4424e (0-9) < R 01c5f59",
            "not recorded"),
        "shapes/matrix-capsnet": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "as caps: P 6d55584 (0-9) < R 80dcbda (committed at the same minute). 04b0a38: 0-4,"
            " never run; dropped in 7c42014. P 6d4424e (0-9) < R 01c5f59 (0-9 anew)",
            "not recorded"),
        "shapes/cnn": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "as cnn: P 6d55584 (0-9) < R 80dcbda (committed at the same minute). 04b0a38: 0-4, "
            "never run; dropped in 7c42014. P 6d4424e (0-9) < R 01c5f59 (0-9 anew)",
            "not recorded"),
        "shapes/cnn-gap": History(
            (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), None,
            "as gap: P 6d55584 (0-9) < R 80dcbda (committed at the same minute); R 7cf144e (gap"
            " anew, other size). 04b0a38: 0-4, never run; dropped in 7c42014. P 6d4424e (0-9) <"
            " R 01c5f59 (0-9 anew)",
            "not recorded"),
        "ablations/capsnet-shared-iters-1": History(
            (0, 1, 2, 3, 4), 0,
            "as parts/dynamic-shared-1: P 338dbc6, cef9ceb (0-4) < R 60b9eea, 5f633ae; 15e59ce "
            "(0-4 anew)",
            "0 (capsnet-shared's / cnn-gap's) (b5ec450)"),
        "gap-toys/matrix-capsnet": History(
            (0, 1, 2, 3, 4), None,
            "P 6d4424e (0-4) < R ec1509d (0,1), 22e63cd (2), 72d0cee (3,4)",
            "0 (those of paper-azimuth, wide-azimuth)"),
        "gap-toys/cnn": History(
            (0, 1, 2, 3, 4), None,
            "P 6d4424e (0-4) < R ec1509d (0), 22e63cd (1,2), 72d0cee (3,4)",
            "0 (those of paper-azimuth, wide-azimuth)"),
        "gap-toys/cnn-bn": History(
            (0, 1, 2, 3, 4), None,
            "P 6d4424e (0-4) < R ec1509d (0), 22e63cd (1,2), 72d0cee (3,4)",
            "0 (those of paper-azimuth, wide-azimuth)"),
        "gap-toys/cnn-gap": History(
            (0, 1, 2, 3, 4), 5,
            "P 6d4424e (0-4) < R ec1509d (0), 22e63cd (1,2), 72d0cee (3), 71e2cd1 (4)",
            "0 (those of paper-azimuth, wide-azimuth)"),
    },
}


def of(experiment, setting):
    """Return the History of a setting, TABLE/SETTING. For several draws of the data, TABLE+TABLE/SETTING, that of the
    first, which all share"""
    tables, _, name = setting.partition("/")
    return HISTORY[experiment][f"{tables.split('+')[0]}/{name}"]
