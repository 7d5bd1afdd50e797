"""What each codec of common/codec/README.md means: the formula of its paper, in a few lines of float64 NumPy each.

Written from the papers, and from proto/WIRE.md where a paper leaves a choice open (draws, exponents, ties), not from the
library's code: where both agree, each has been checked by the other. test_codec_reference.py compares them.

A class is one job. `step` takes the gradients of all workers, gradients[worker][tensor], flat, and returns per tensor the
mean that everyone gets. A scheme sees one run of a tensor at a time; `u` are the numbers in [0, 1) that it draws there.
"""

import itertools
import math
import statistics

import numpy as np

MASK = (1 << 64) - 1


# WIRE.md, "Sketch" and "Sparse segments"; common/codec/README.md on salts ------------------------------------------------

def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def combine(a, b):
    return mix(a ^ mix(b))


def hashed(name, seed=0):
    h = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & MASK
    return mix(h)


def bits(salt, index):
    """32 bits for each index."""
    h = (np.asarray(index, np.uint64) * 0x9E3779B9 ^ (salt & 0xFFFFFFFF)) & 0xFFFFFFFF
    h = (h ^ h >> np.uint64(16)) * 0x7FEB352D & 0xFFFFFFFF
    h = (h ^ h >> np.uint64(15) ^ np.uint64(salt >> 32)) * 0x846CA68B & 0xFFFFFFFF
    return h ^ h >> np.uint64(16)


def uniforms(salt, count):
    return (bits(salt, np.arange(count)) >> np.uint64(8)) / 2.0**24


# The frame around all of them --------------------------------------------------------------------------------------------

class Codec:
    """The mean of what each worker's frame stands for; `send` says what that is, `memory` is what a worker keeps."""

    def __init__(self, shapes, workers, seed, run):
        self.shapes, self.workers, self.seed, self.run = shapes, workers, seed, run
        self.names = list(shapes)
        self.drawers = [f"worker-{w}" for w in range(workers)]
        self.round = 0  # round 0 of a job carries no values
        self.memory = self.zeros()

    def zeros(self):
        return [[np.zeros(math.prod(s)) for s in self.shapes.values()] for _ in range(self.workers)]

    def step(self, gradients):
        self.round += 1
        frames = [self.frame(w, gradients[w]) for w in range(self.workers)]
        return [sum(of_tensor) / self.workers for of_tensor in zip(*frames, strict=True)]

    def frame(self, w, gradients):
        return [self.send(w, t, g) for t, g in enumerate(gradients)]

    def runs(self, t):
        n = math.prod(self.shapes[self.names[t]])
        return [slice(i, min(i + self.run, n)) for i in range(0, n, self.run)]

    def shared_salt(self, t, offset):
        return combine(combine(self.seed, self.round), hashed(self.names[t], offset))

    def own_salt(self, w, t, offset):
        return combine(combine(self.seed, hashed(self.drawers[w])), combine(hashed(self.names[t], offset), self.round))


class BothWays:
    """BytePS-Compress, arXiv 2105.07829, algorithms 3 and 4: the shard compresses the mean as a worker does its gradient."""

    def __init__(self, *job, push, update):
        shapes, _, *rest = job
        self.push, self.update = push(*job), update(shapes, 1, *rest)
        self.update.drawers = ["update"]

    def step(self, gradients):
        return self.update.step([self.push.step(gradients)])


class Quantised(Codec):
    """Run by run. With feedback (Seide et al. 2014; Karimireddy et al. 2019, algorithm 1): p = g + e, e = p - C(p)."""

    def __init__(self, *job, scheme, feedback=False):
        super().__init__(*job)
        self.scheme, self.feedback = scheme, feedback

    def send(self, w, t, g):
        p = g + self.memory[w][t]
        sent = np.concatenate([self.scheme(p[r], uniforms(self.own_salt(w, t, r.start), r.stop - r.start))
                               for r in self.runs(t)])
        if self.feedback:
            self.memory[w][t] = p - sent
        return sent


def sign(x):
    return np.where(x >= 0, 1.0, -1.0)  # 0 counts as positive


def fp32(x, u=None):
    return x


def fp16(x, u=None):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)


def bf16(x, u=None):
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)  # 8 significant bits, ties to even


def onebit(x, u):
    """Seide et al. 2014, section 3.2: the sign; what stands for either sign is the mean of the values that have it."""
    out = np.empty_like(x)
    for side in (x >= 0, x < 0):
        out[side] = x[side].mean() if side.any() else 0
    return out


def signsgd(x, u):
    """Bernstein et al. 2018, algorithm 1."""
    return sign(x)


def efsignsgd(x, u):
    """Karimireddy et al. 2019, algorithm 1: ||p||_1 / d * sign(p)."""
    return np.abs(x).sum() / x.size * sign(x)


def terngrad(x, u, clip=0.0):
    """Wen et al. 2017, eq. 1 to 4: s sign(g) b, P(b = 1) = |g| / s, s = max |g|; eq. 5 clips at c standard deviations, which
    here must be more than the mean."""
    if clip * x.std() > abs(x.mean()):
        x = np.clip(x, -clip * x.std(), clip * x.std())
    s = np.abs(x).max()
    return s * np.sign(x) * (u * s < np.abs(x))


def norm_of(x, norm):
    return np.abs(x).max() if norm == "max" else np.sqrt((x * x).sum())


def dithering(x, u, norm, levels):
    """To one of the levels next to |x| / norm, the upper one by the chance that keeps the expectation."""
    n = norm_of(x, norm)
    if n == 0:
        return np.zeros_like(x)
    fraction = np.abs(x) / n
    below = np.minimum(np.searchsorted(levels, fraction, side="right") - 1, len(levels) - 2)
    low, high = levels[below], levels[below + 1]
    return n * np.sign(x) * np.where(u * (high - low) < fraction - low, high, low)


def qsgd(x, u, bits, norm="l2"):
    """Alistarh et al. 2017, section 3.1: s even levels of the Euclidean norm (BytePS-Compress: or of the largest)."""
    s = 2 ** (bits - 1) - 1
    return dithering(x, u, norm, np.arange(s + 1) / s)


def natural(x, u, bits, norm="max"):
    """Horvath et al. 2019, definition 2: levels 0, 2^(1-s), ..., 1/2, 1."""
    s = 2 ** (bits - 1) - 1
    return dithering(x, u, norm, np.array([0.0, *(2.0**-k for k in reversed(range(s)))]))


class Signum(Codec):
    """Bernstein et al. 2018, algorithm 2: m = beta m + (1 - beta) g; sign(m)."""

    def __init__(self, *job, momentum):
        super().__init__(*job)
        self.momentum = momentum

    def send(self, w, t, g):
        self.memory[w][t] = self.momentum * self.memory[w][t] + (1 - self.momentum) * g
        return sign(self.memory[w][t])


# Sparse codecs -----------------------------------------------------------------------------------------------------------

def integers(values, largest):
    """Of a segment: its largest magnitude is `largest`."""
    scale = np.abs(values).max(initial=0) / largest
    return values if scale == 0 else np.rint(values / scale) * scale


def as_int8(part, block=128):
    """What FSDP's units see of a rank's part of a matrix (FSDPState, gather="int8"), in float32 as ZeRO++ has it."""
    flat = np.float32(part).reshape(-1)
    out = []
    for values in np.split(flat, range(block, len(flat), block)):
        scale = np.abs(values).max(initial=0) / np.float32(127)
        out.append(np.rint(values / scale) * scale if scale > 0 else 0 * values)
    return np.concatenate(out).reshape(np.shape(part))


def two_magnitudes(values):
    """Of a segment: the sign and one of two magnitudes, four turns of Lloyd's algorithm (IEEE Trans. Inf. Theory 28(2), 1982) from
    the mean."""
    magnitudes = np.abs(values)
    low = high = magnitudes.mean() if len(values) else 0.0
    for _ in range(4):
        above = magnitudes > (low + high) / 2
        if above.all() or not above.any():
            break
        low, high = magnitudes[~above].mean(), magnitudes[above].mean()
    return np.where(values < 0, -1, 1) * np.where(magnitudes > (low + high) / 2, high, low)


VALUES = {"fp32": fp32, "fp16": fp16, "bf16": bf16, "int8": lambda v: integers(v, 127), "int6": lambda v: integers(v, 31),
          "int4": lambda v: integers(v, 7), "2bit": two_magnitudes}


class Sparse(Codec):
    """Some of the elements; what is not sent stays: p = beta e + x, e = p - C(p). Stich et al. 2018, algorithm 1 (beta 1);
    SparseLoCo, arXiv 2508.15706, algorithm 1, for deltas of local steps. beta2: x is g / (sqrt(v) + eps) (push "step")."""

    def __init__(self, *job, values="fp32", feedback=True, decay=1.0, beta2=None, epsilon=1e-8, warmup=None,
                 density=1.0):
        super().__init__(*job)
        self.values, self.feedback, self.decay = VALUES[values], feedback, decay
        self.beta2, self.epsilon = beta2, epsilon
        self.warmup, self.density = warmup, density
        self.second = self.zeros()

    def take_in(self, w, t, g):
        if self.beta2 is not None:  # Kingma and Ba 2015, algorithm 1
            self.second[w][t] = self.beta2 * self.second[w][t] + (1 - self.beta2) * g * g
            g = g / (np.sqrt(self.second[w][t] / (1 - self.beta2**self.round)) + self.epsilon)
        return self.decay * self.memory[w][t] + g

    def frame(self, w, gradients):
        pending = [self.take_in(w, t, g) for t, g in enumerate(gradients)]
        chosen = [self.choose(t, p) for t, p in enumerate(pending)]
        values = iter(self.values(np.concatenate([p[c] for p, c in zip(pending, chosen, strict=True)])))
        frame = []
        for t, (p, c) in enumerate(zip(pending, chosen, strict=True)):
            sent = np.zeros_like(p)
            sent[c] = [next(values) for _ in range(int(c.sum()))]
            if self.feedback:
                self.memory[w][t] = p - sent
            self.mask(w, t, c)
            frame.append(sent)
        return frame

    def mask(self, w, t, chosen):
        pass

    def choose(self, t, p):
        return p != 0  # ZEN, Wang et al. 2025; adaptive

    def density_now(self):
        """Lin et al. 2017, section 3.3: the density falls geometrically in the first rounds."""
        rounds, first = self.warmup or (0, self.density)
        return self.density if self.round > rounds else first * (self.density / first) ** ((self.round - 1) / rounds)

    def largest(self, t, p):
        """Lin et al. 2017, algorithm 1: the `density` largest magnitudes. Those that agree in 16 significant bits are tied,
        and taken in the order of WIRE.md, "Sketch"."""
        wanted = self.density_now() * p.size
        mantissa, exponent = np.frexp(np.abs(p))
        key = np.ldexp(np.floor(mantissa * 2**16), exponent)
        threshold = np.sort(key)[::-1][min(math.ceil(wanted), p.size) - 1]
        above, tied = key > threshold, (key == threshold) & (p != 0)
        keep = int(min(1.0, (wanted - above.sum()) / max(1, tied.sum())) * 2**32)
        phase = mix(mix(self.seed ^ mix(hashed(self.names[t]))) ^ mix(self.round)) >> 32
        return above | tied & ((np.arange(p.size, dtype=np.uint64) * 0x9E3779B9 + phase) % 2**32 < keep)


class TopK(Sparse):
    def choose(self, t, p):
        return self.largest(t, p)


class Threshold(Sparse):
    """Sahu et al. 2021, section 4: |p| >= lambda."""

    def __init__(self, *job, value, **options):
        super().__init__(*job, **options)
        self.value = value

    def choose(self, t, p):
        return np.abs(p) >= self.value


class Union(Sparse):
    """An update codec (proto/TWO_WAY.md): what anybody sent, with what earlier rounds left there."""

    def take_in(self, w, t, g):
        self.touched = getattr(self, "touched", {})
        self.touched[t] = g != 0
        return super().take_in(w, t, g)

    def choose(self, t, p):
        return self.touched[t]


class RandomK(Sparse):
    """Stich et al. 2018, definition 2.1: random positions, those of all workers the same."""

    def choose(self, t, p):
        return np.concatenate([bits(self.shared_salt(t, r.start), np.arange(r.stop - r.start)) < self.density * 2**32
                               for r in self.runs(t)])


class Dgc(TopK):
    """Lin et al. 2017, algorithm 4 in appendix B: momentum correction (3.2), local clipping at clip / sqrt(N), momentum factor
    masking (3.3); u = m u + g, v = v + u, with Nesterov u = m (u + g), v = v + u + g."""

    def __init__(self, *job, momentum, nesterov=False, clip=0.0, **options):
        super().__init__(*job, **options)
        self.momentum, self.nesterov, self.clip = momentum, nesterov, clip
        self.velocity = self.zeros()

    def take_in(self, w, t, g):
        norm = np.sqrt((g * g).sum())
        if self.clip and norm > self.clip / math.sqrt(self.workers):
            g = g * (self.clip / math.sqrt(self.workers) / norm)
        if self.nesterov:
            self.velocity[w][t] = self.momentum * (self.velocity[w][t] + g)
            return self.memory[w][t] + self.velocity[w][t] + g
        self.velocity[w][t] = self.momentum * self.velocity[w][t] + g
        return self.memory[w][t] + self.velocity[w][t]

    def mask(self, w, t, chosen):
        self.velocity[w][t][chosen] = 0


# Codecs whose workers agree on an exponent per run a round ahead ---------------------------------------------------------

class Agreed(Codec):
    """p = g + e; an exponent is that of the largest range that any worker had in the round before, and falls only by two or
    more (common/codec/README.md). Round 0 shows the gradients of the first step."""

    def __init__(self, *job):
        super().__init__(*job)
        self.exponents = [[None] * len(self.runs(t)) for t in range(len(self.names))]

    def step(self, gradients):
        if self.round == 0:
            self.agree(gradients)
        self.pending = [[e + g for e, g in zip(*of, strict=True)] for of in zip(self.memory, gradients, strict=True)]
        shown = [[p.copy() for p in of] for of in self.pending]
        mean = super().step(gradients)
        self.agree(shown)
        return mean

    def agree(self, pending):
        for t, exponents in enumerate(self.exponents):
            for i, r in enumerate(self.runs(t)):
                wanted = max(self.range_of(of[t][r]) for of in pending) + self.above_range
                if exponents[i] is None or wanted > exponents[i] or wanted <= exponents[i] - 2:
                    exponents[i] = wanted

    def send(self, w, t, g):
        p = self.pending[w][t]
        sent = np.concatenate([self.encode(w, t, r, p[r], self.exponents[t][i]) for i, r in enumerate(self.runs(t))])
        self.memory[w][t] = p - sent
        return sent


class Fixed(Agreed):
    """Integers times 2^e; one worker's within +-limit, so that sums of all never wrap. headroom: bits for growth."""

    def __init__(self, *job, bits, headroom, most=math.inf):
        super().__init__(*job)
        self.limit = min((2 ** (bits - 1) - 1) // self.workers, most)
        self.above_range = headroom - int(math.log2(self.limit))

    def range_of(self, x):
        mantissa, exponent = math.frexp(np.abs(x).max())
        return min(23, max(-40, exponent - (mantissa == 0.5)))

    def encode(self, w, t, run, x, e):
        return np.clip(np.rint(x * 2.0**-e), -self.limit, self.limit) * 2.0**e


class Tagc(Fixed):
    """TAGC, arXiv 2504.05638: the largest magnitudes of p through lists or a count sketch, which LHC, arXiv 2402.07529, peels. Where
    all of it is recovered, the mean is that of the integers that went in. Narrow cells use what is between powers of 2. own: bits of
    a worker's integers, where they are fewer than the cells have room for; of two, a sign stands for twice as much, too."""
    density_now, largest = Sparse.density_now, Sparse.largest

    def __init__(self, *job, bits, density, warmup=None, own=None):
        workers = job[1]
        most = 2 ** (own - 1) - 1 if own else math.inf
        limit = min((2 ** (bits - 1) - 1) // workers, most)
        beyond = own == 2 or limit > 1 and limit >= 1.5 * 2 ** int(math.log2(limit))
        super().__init__(*job, bits=bits, headroom=4 if bits == 32 and not own else -int(beyond), most=most)
        self.density, self.warmup = density, warmup

    def send(self, w, t, g):
        self.chosen = self.largest(t, self.pending[w][t])
        return super().send(w, t, g)

    def encode(self, w, t, run, x, e):
        return np.where(self.chosen[run], super().encode(w, t, run, x, e), 0)


class Levels(Agreed):
    """Ranges in steps of sqrt(2): the least r with 2^(r/2) >= the magnitude."""
    above_range = 0

    def range_of(self, x):
        r = -80
        while self.magnitude(x) > 2.0 ** (r / 2):
            r += 1
        return r


class Uniform(Levels):
    """Li et al., NSDI 2024 (THC), section 4.1: even levels from minus to plus the range, to nearest or by chance."""

    def __init__(self, *job, bits, stochastic=False):
        super().__init__(*job)
        self.limit, self.stochastic = 2 ** (bits - 1) - 1, stochastic

    def magnitude(self, x):
        return np.abs(x).max()

    def encode(self, w, t, run, x, e):
        unit = 2.0 ** (e / 2) / self.limit
        scaled = np.clip(x / unit, -self.limit, self.limit)
        if not self.stochastic:
            return np.rint(scaled) * unit
        low = np.floor(scaled)
        return (low + (uniforms(self.own_salt(w, t, run.start), x.size) < scaled - low)) * unit

    def send(self, w, t, g):
        sent = super().send(w, t, g)
        if self.stochastic:  # unbiased: only what lies beyond the range is kept
            reach = np.concatenate([np.full(r.stop - r.start, 2.0 ** (e / 2))
                                    for r, e in zip(self.runs(t), self.exponents[t], strict=True)])
            self.memory[w][t] = self.pending[w][t] - np.clip(self.pending[w][t], -reach, reach)
        return sent


class Thc(Levels):
    """Li et al., NSDI 2024: rotate (4.2), to an entry of the table next to it by chance (4.3), add, rotate back."""

    def __init__(self, *job, bits, granularity, p):
        super().__init__(*job)
        self.half = granularity // 2
        self.reach = statistics.NormalDist().inv_cdf(1 - p / 2)
        self.table = thc_table(bits, granularity, self.reach)

    def magnitude(self, x):
        return np.sqrt((x * x).sum() / self.padded(x))

    @staticmethod
    def padded(x):
        return 1 << (x.size - 1).bit_length()

    def encode(self, w, t, run, x, e):
        d = self.padded(x)
        turn = 1 - 2.0 * (bits(self.shared_salt(t, run.start), np.arange(d) // 32) >> (np.arange(d) % 32).astype(np.uint64)
                          & np.uint64(1))
        index = np.arange(d)
        hadamard = 1 - 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) % 2)
        unit = self.reach * 2.0 ** (e / 2) / (self.half * math.sqrt(d))
        y = np.clip(hadamard @ (turn * np.pad(x, (0, d - x.size))) / (unit * d), -self.half, self.half)
        below = np.minimum(np.searchsorted(self.table, y, side="right") - 1, len(self.table) - 2)
        low, high = self.table[below], self.table[below + 1]
        sent = np.where(uniforms(self.own_salt(w, t, run.start), d) * (high - low) < y - low, high, low)
        return (turn * (hadamard @ sent) * unit)[:x.size]


def thc_table(bits, granularity, reach):
    """Section 4.3 by trying all: the symmetric 2^bits integers whose expected squared error, for a normal number within the
    reach that goes to one of its two neighbours by chance, is least. Of z between a and b that is (b - z)(z - a)."""
    half, positive = granularity // 2, 2 ** (bits - 1)
    normal = statistics.NormalDist()

    def cost(i, j):
        a, b = i * reach / half, j * reach / half
        zeroth = normal.cdf(b) - normal.cdf(a)
        first = normal.pdf(a) - normal.pdf(b)
        second = zeroth + a * normal.pdf(a) - b * normal.pdf(b)
        return (a + b) * first - second - a * b * zeroth

    costs = {(i, j): cost(i, j) for i in range(-half, half) for j in range(i + 1, half + 1)}
    tables = [sorted([-half, half, *inner, *(-i for i in inner)])
              for inner in itertools.combinations(range(1, half), positive - 1)]
    return np.array(min(tables, key=lambda table: sum(costs[pair] for pair in itertools.pairwise(table))), float)


class PowerSgd(Codec):
    """Vogels et al. 2019, algorithm 1: P = mean of M Q, P orthonormal, Q = mean of M^T P, warm start; M^ = P Q^T. Only the
    span of P's columns counts, so any orthonormal basis of it will do. Algorithm 2: the residual is M - P Q^T, here with
    the worker's own Q. Vectors, and matrices that would not get smaller, travel as they are."""

    def __init__(self, *job, rank):
        super().__init__(*job)
        self.rank, self.q = rank, {}

    def step(self, gradients):
        return [self.matrix(t, gradients) if self.smaller(t) else sum(of[t] for of in gradients) / self.workers
                for t in range(len(self.names))]

    def smaller(self, t):
        shape = self.shapes[self.names[t]]
        return len(shape) > 1 and self.rank * (shape[0] + math.prod(shape[1:])) < math.prod(shape)

    def matrix(self, t, gradients):
        rows = self.shapes[self.names[t]][0]
        m = [(of[t] + e[t]).reshape(rows, -1) for of, e in zip(gradients, self.memory, strict=True)]
        if t not in self.q:
            self.q[t] = uniforms(self.shared_salt(t, 0), self.rank * m[0].shape[1]).reshape(self.rank, -1).T - 0.5
        p, _ = np.linalg.qr(sum(m) @ self.q[t])
        own = [of.T @ p for of in m]
        for w, of in enumerate(m):
            self.memory[w][t] = (of - p @ own[w].T).ravel()
        self.q[t] = sum(own) / self.workers
        return (p @ self.q[t].T).ravel()
