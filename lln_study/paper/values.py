"""The numbers that the paper prints (arXiv:2311.13541, version 4), by table; None = not given."""

from __future__ import annotations

Numbers = dict[str, tuple[float | None, ...]]

# Table 1: accuracy in per cent on MNLI, QNLI, QQP, SST-2, and their mean.
TABLE_1: Numbers = {
    "softmax": (80.3, 87.2, 89.9, 90.6, 87.0),
    "reformer": (35.4, None, 63.2, 50.9, 49.8),
    "performer": (58.8, 63.4, 79.1, 81.4, 70.6),
    "elu": (74.8, 82.5, 86.9, 87.2, 82.8),
    "longformer": (77.2, None, 85.5, 88.6, 83.7),
    "transformer_ls": (77.0, 84.8, 86.8, 90.2, 84.7),
    "tnn": (76.72, 85.06, 88.3, 90.6, 85.17),
    "transnormer_t2": (77.28, 85.39, 88.56, 90.71, 85.48),
    "cosformer": (76.7, None, 89.2, 91.0, 85.6),
    "transnormer_t1": (79.06, 87.0, 88.61, 91.17, 86.46),
    "flash": (79.45, 87.1, 88.83, 90.71, 86.52),
    "nystromformer": (80.9, 88.7, 86.3, 91.4, 86.8),
    "lln": (77.0, 85.1, 88.9, 90.6, 85.4),
    "lln_diag": (80.0, 86.5, 89.7, 91.6, 86.9),
}

# Table 2: a training step of RoBERTa-base at these lengths; None = out of memory.
TABLE_2_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TABLE_2_GB: Numbers = {
    "softmax": (4.0, 5.5, 12.6, 32.1, None, None),
    "nystromformer": (4.0, 4.5, 5.5, 7.3, 11.6, 19.1),
    "lln": (4.1, 4.4, 5.7, 7.5, 12.0, 20.1),
    "lln_diag": (4.1, 4.6, 6.1, 8.1, 13.4, 23.0),
}
TABLE_2_SECONDS: Numbers = {
    "softmax": (0.95, 1.05, 2.4, 6.8, None, None),
    "nystromformer": (1.8, 1.9, 2.6, 4.7, 8.8, 16.7),
    "lln": (1.0, 1.05, 1.6, 3.2, 6.1, 11.8),
    "lln_diag": (1.2, 1.3, 1.9, 3.6, 6.9, 13.3),
}

# Table 3: accuracy in per cent of ViT on Dogs vs Cats.
TABLE_3: dict[str, float] = {"softmax": 81.37, "lln_diag": 81.72, "linformer": 79.89}

# Tables 4 and 5: Text, ListOps, Retrieval, Pathfinder, Image.
ARENA: tuple[str, ...] = ("text", "listops", "retrieval", "pathfinder", "image")
TABLE_4_SECONDS: Numbers = {
    "softmax": (21468, 5905, 21866, 6754, 13228),
    "reformer": (4610, 2439, 4714, 4694, 8737),
    "performer": (3456, 1966, 3761, 3553, 13169),
    "skyformer": (4523, 2970, 5602, 5240, 9347),
    "lln_diag": (3043, 1774, 3135, 3042, 4053),
}
TABLE_4_MB: Numbers = {
    "softmax": (17108, 4458, 8934, 4817, 9632),
    "reformer": (3261, 1631, 3008, 3258, 6514),
    "performer": (2176, 1122, 2178, 2180, 4353),
    "skyformer": (3068, 1697, 2974, 4041, 8079),
    "lln_diag": (1641, 821, 1586, 1639, 3276),
}
TABLE_5: Numbers = {
    "softmax": (60.41, 38.05, 79.95, 71.3, 37.2),
    "reformer": (61.27, 37.05, 78.74, 67.23, 44.04),
    "performer": (57.85, 37.8, 80.5, 62.58, 37.56),
    "skyformer": (60.88, 39.36, 81.54, 70.23, 32.64),
    "lln_diag": (60.72, 38.91, 81.21, 69.81, 38.65),
}

# Fig. 9: the range in which α and β stay while the ViT trains.
FIGURE_9_RANGE = (2.0, 2.2)
