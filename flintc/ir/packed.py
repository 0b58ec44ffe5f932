"""How kernels want the codes of an NVFP4 weight to lie, beyond the order of bits within a word."""

from __future__ import annotations

#: Rows and columns of a block: 512 bytes of codes, which a warp loads at once, a lane 16 of them.
BLOCK_ROWS, BLOCK_COLUMNS = 8, 128

#: Columns of a row in a lane's 16 bytes.
LANE_COLUMNS = 32


def in_blocks(rows: int, columns: int) -> bool:
    """Whether a matrix [rows, columns] (of one expert, where they are stacked) lies block by block.

    Each eight rows then follow each other as before, but among them blocks come one after the other, and within a block
    its rows. Halves of the rows, as gate and up are, are to be whole blocks too.
    """
    return rows % (2 * BLOCK_ROWS) == 0 and columns % BLOCK_COLUMNS == 0
