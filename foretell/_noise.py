"""Random numbers that depend on nothing but their key; the package has no others.

A counter-based generator: every number is a hash of what it is for, so it can be computed
alone, in any order, and again. The hash is the output function of SplitMix64 (Steele, Lea and
Flood 2014; constants of Stafford's variant 13), written out in 64-bit integer arithmetic, and
the logarithm is that of fdlibm in plain additions, multiplications and divisions. NumPy rounds
those the same way everywhere, so the bits depend neither on its version, nor on the processor,
nor on the place a number has in an array.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
TWO_53 = float(1 << 53)


def key_of(*parts: int) -> int:
    """A 64-bit key of whole numbers from 0 to 2^64 - 1; their order matters."""
    state = _GOLDEN
    for part in parts:
        state = (_mix(state ^ part) + _GOLDEN) & _MASK
    return _mix(state)


def bits_of(key: int, ids: Ids) -> Bits:
    """53 random bits under ``key`` for each id."""
    z = ids.astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key)
    return _mix_array(z)


def uniforms(bits: Bits) -> Floats:
    """Multiples of 2^-53 in the open interval from 0 to 1; 0 itself becomes 2^-54."""
    result: Floats = np.maximum(as_floats(bits), 0.5) / TWO_53
    return result


def as_floats(bits: Bits) -> Floats:
    """53 bits as a whole number; signed on the way, which converts several times faster."""
    return bits.view(np.int64).astype(np.float64)


def uniform(key: int) -> float:
    """One number in the open interval from 0 to 1."""
    return float(uniforms(bits_of(key, np.zeros(1, np.int64)))[0])


def gumbel(bits: Bits) -> Floats:
    """Standard Gumbel noise, -log(-log u): between -3.7 and 36.8, so always finite."""
    return -log(-log(uniforms(bits)))


def log(x: Floats) -> Floats:
    """Natural logarithm of positive normal numbers, to less than a unit in the last place."""
    as_bits = x.view(np.int64)
    exponent = (as_bits >> 52) - 1023
    mantissa = ((as_bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    large = mantissa > 1.4142135623730951
    mantissa = np.where(large, mantissa * 0.5, mantissa)
    k = (exponent + large).astype(np.float64)
    # log(1 + f) = f - f^2/2 + s (f^2/2 + R(s^2)) with s = f / (2 + f); the names are fdlibm's.
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    t1 = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * _LG6))
    t2 = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 + w * (_LG5 + w * _LG7)))
    half = 0.5 * f * f
    result: Floats = k * _LN2_HIGH - ((half - (s * (half + (t2 + t1)) + k * _LN2_LOW)) - f)
    return result


_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LG5, _LG6, _LG7 = 1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _mix_array(z: Bits) -> Bits:
    """``_mix`` in place, then the upper 53 bits."""
    shifted = z >> np.uint64(30)
    z ^= shifted
    z *= np.uint64(_FIRST)
    np.right_shift(z, np.uint64(27), out=shifted)
    z ^= shifted
    z *= np.uint64(_SECOND)
    np.right_shift(z, np.uint64(31), out=shifted)
    z ^= shifted
    z >>= np.uint64(11)
    return z
