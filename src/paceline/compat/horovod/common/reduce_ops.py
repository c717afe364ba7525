"""The reductions, under Horovod's own numbers."""

from __future__ import annotations

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

NAMES = {
    Average: "Average",
    Sum: "Sum",
    Adasum: "Adasum",
    Min: "Min",
    Max: "Max",
    Product: "Product",
}
