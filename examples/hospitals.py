"""Five hospitals with a CSV each, and a public test set: scikit-learn's breast cancer data, dealt out unequally.

    python examples/hospitals.py files

writes files/north.csv, south.csv, east.csv, west.csv, coast.csv and public.csv, for docs/hospitals.md. A row is one
patient: a made-up number, ten measurements of a cell sample, and what it turned out to be.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

SHARES = {"north": 0.32, "south": 0.20, "east": 0.14, "west": 0.09, "coast": 0.05, "public": 0.20}
MEASURED = 10  # the first ten columns: the means over a sample's cells


def write(folder: Path) -> dict[str, int]:
    """Writes the files; returns the number of patients in each."""
    data = load_breast_cancer()
    names = [name.replace("mean ", "").replace(" ", "_") for name in data.feature_names[:MEASURED]]
    order = np.random.default_rng(0).permutation(len(data.target))
    ends = np.round(np.cumsum(list(SHARES.values())) * len(order)).astype(int)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(SHARES, np.split(order, ends[:-1]), strict=True):
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["patient", *names, "diagnosis"])
            for row in rows:
                cells = [f"{value:g}" for value in data.data[row, :MEASURED]]
                table.writerow([f"{name}-{row}", *cells, ["malignant", "benign"][data.target[row]]])
    return {name: len(rows) for name, rows in zip(SHARES, np.split(order, ends[:-1]), strict=True)}


if __name__ == "__main__":
    for name, patients in write(Path(sys.argv[1])).items():
        print(f"{name}.csv: {patients} patients")
