"""The papers' formulas, one function each, in plain Python: reference values for checking any capsule routing.

Every function follows one numbered formula of

    Sabour, Frosst and Hinton 2017, "Dynamic routing between capsules" (written 2017 below)
    Hinton, Sabour and Frosst 2018, "Matrix capsules with EM routing" (written 2018 below)

with nested lists and one loop per index. This module imports no array library and none of this project's other modules,
so that its values are independent of the NumPy functions that are checked against them. It is slow, and meant for a few
capsules.

All functions accept complex numbers and are analytic wherever the formula is differentiable: they compare and choose by
the real part alone. The derivative along one entry is then the imaginary part of f(x + ih) divided by h, for h = 1e-30,
without cancellation and exact to rounding; see `gradient`.

Axes: n sample, i input capsule (child), j output capsule (parent), d entry of an input capsule, e entry of an output
capsule, h entry of a vectorized pose matrix, t iteration.
"""
import cmath
import math

STEP = 1e-30                     # of the complex step: its square vanishes beside any real part
RECONSTRUCTION_WEIGHT = 0.0005   # 2017, Section 4.1


# ---- numbers and nested lists ----

def real(x):
    """Return the real parts of a number or of nested lists of numbers."""
    if isinstance(x, (list, tuple)):
        return [real(item) for item in x]
    return x.real if isinstance(x, complex) else float(x)


def exp(z):
    """Return e to the power z, for real or complex z."""
    return cmath.exp(z) if isinstance(z, complex) else math.exp(z)


def log(z):
    """Return the natural logarithm of z, real or complex. Real z must be positive."""
    return cmath.log(z) if isinstance(z, complex) else math.log(z)


def sqrt(z):
    """Return the square root of z, real or complex. Real z must not be negative."""
    return cmath.sqrt(z) if isinstance(z, complex) else math.sqrt(z)


def positive_part(z):
    """Return max(0, z), chosen by the real part of z. Its derivative at 0 is taken as 0."""
    return z if real(z) > 0 else 0.0


def logistic(z):
    """Return 1 / (1 + exp(-z)), without overflow."""
    if real(z) >= 0:
        return 1 / (1 + exp(-z))
    return exp(z) / (1 + exp(z))


def log_logistic(z):
    """Return log(logistic(z)), without overflow and without the logarithm of 0."""
    if real(z) >= 0:
        return -log(1 + exp(-z))
    return z - log(1 + exp(z))


def zeros(*shape):
    """Return nested lists of zeros with the given lengths."""
    if not shape:
        return 0.0
    return [zeros(*shape[1:]) for _ in range(shape[0])]


def inner(x, y):
    """Return the sum of the products of corresponding entries of x and y, which turns any output into one number."""
    if isinstance(x, (list, tuple)):
        if len(x) != len(y):
            raise ValueError(f"cannot pair {len(x)} entries with {len(y)}: x and y must have the same shape")
        return sum(inner(a, b) for a, b in zip(x, y))
    return x * y


def gradient(f, x):
    """Return the derivative of f with respect to every entry of x, by the complex step.

    f: function of nested lists shaped like x (or of one number) that returns one number, built from this module's
    functions. x: real entries. Return nested lists shaped like x. Costs one evaluation of f per entry of x.
    """
    def with_step(node, path):
        if not path:
            return complex(node, STEP)
        return [with_step(item, path[1:]) if k == path[0] else item for k, item in enumerate(node)]

    def derivatives(node, path):
        if isinstance(node, (list, tuple)):
            return [derivatives(item, path + (k,)) for k, item in enumerate(node)]
        return complex(f(with_step(x, path))).imag / STEP

    return derivatives(x, ())


# ---- dynamic routing (2017) ----

def squash(s):
    """Return v = |s|^2 / (1 + |s|^2) * s / |s| (2017, Eq. 1) for one vector s.

    Written as s |s| / (1 + |s|^2), which is the same function and has its limit, 0, at s = 0, where Eq. 1 reads 0 / 0.
    """
    # s, v: [e]
    norm2 = sum(s[e] * s[e] for e in range(len(s)))
    norm = sqrt(norm2)
    return [s[e] * norm / (1 + norm2) for e in range(len(s))]


def primary_capsules(conv, n_entries):
    """Return u, the squashed primary capsules, from the output of their convolution (2017, Section 4 and Eq. 1).

    All entries of a capsule come from one position of the grid. The paper does not say which channels form a capsule:
    here channel k * n_entries + d is entry d of capsule type k, and the capsules are in the order row, column, type.
    The paper calls Eq. 1 the nonlinearity of this convolution, so no other one (such as ReLU) comes before it.
    """
    # conv: [n][row][column][channel]
    u = []   # [n][i][d]
    for n in range(len(conv)):
        u.append([])
        for row in range(len(conv[n])):
            for column in range(len(conv[n][row])):
                for k in range(len(conv[n][row][column]) // n_entries):
                    u[n].append(squash([conv[n][row][column][k * n_entries + d] for d in range(n_entries)]))
    return u


def votes(u, W):
    """Return the votes (prediction vectors) u_hat_j|i = W_ij u_i (2017, Eq. 2, right part), one matrix per (i, j)."""
    # u: [n][i][d]; W: [i][j][e][d]
    N, I, J, E, D = len(u), len(W), len(W[0]), len(W[0][0]), len(W[0][0][0])
    u_hat = zeros(N, I, J, E)   # [n][i][j][e]
    for n in range(N):
        for i in range(I):
            for j in range(J):
                for e in range(E):
                    u_hat[n][i][j][e] = sum(W[i][j][e][d] * u[n][i][d] for d in range(D))
    return u_hat


def softmax(b):
    """Return c_ij = exp(b_ij) / sum_k exp(b_ik), over the output capsules k of one input capsule (2017, Eq. 3)."""
    # b, c: [j]
    largest = max(real(b))   # a constant that cancels in the quotient, so it need not be differentiated
    powers = [exp(b[j] - largest) for j in range(len(b))]
    total = sum(powers)
    return [powers[j] / total for j in range(len(b))]


def weighted_votes(c, u_hat):
    """Return s_j = sum_i c_ij u_hat_j|i (2017, Eq. 2, left part)."""
    # c: [n][i][j]; u_hat: [n][i][j][e]
    N, I, J, E = len(u_hat), len(u_hat[0]), len(u_hat[0][0]), len(u_hat[0][0][0])
    s = zeros(N, J, E)   # [n][j][e]
    for n in range(N):
        for j in range(J):
            for e in range(E):
                s[n][j][e] = sum(c[n][i][j] * u_hat[n][i][j][e] for i in range(I))
    return s


def dynamic_routing(u_hat, n_iters, constant_couplings=False):
    """Compute the output capsules by dynamic routing (2017, Procedure 1), and keep every iteration.

    The logits b start at 0 for every sample, accumulate over the iterations, and are not updated after the last one.
    Procedure 1 updates them there, too, but never uses that update. The paper adds that the initial logits can be
    learned as priors; its networks start them at 0 (Section 4), as Procedure 1 does.

    u_hat: votes, [n][i][j][e]. n_iters: at least 1; 1 gives uniform coupling coefficients. constant_couplings: take the
    coupling coefficients as constants, so that `gradient` differentiates the last weighted sum and squash alone. The
    paper does not mention stopped gradients, and its authors' code stops none, so False is the paper's gradient.
    Return a list with one dict per iteration: b and c, [n][i][j]; s and v, [n][j][e]. The output is v of the last one.
    """
    if n_iters < 1:
        raise ValueError(f"n_iters is {n_iters}, but Procedure 1 needs at least 1 iteration to compute an output")
    N, I, J, E = len(u_hat), len(u_hat[0]), len(u_hat[0][0]), len(u_hat[0][0][0])
    b = zeros(N, I, J)   # [n][i][j]
    iterations = []
    for t in range(n_iters):
        c = zeros(N, I, J)   # [n][i][j]
        for n in range(N):
            for i in range(I):
                c[n][i] = softmax(b[n][i])
        if constant_couplings:
            c = real(c)
        s = weighted_votes(c, u_hat)   # [n][j][e]
        v = [[squash(s[n][j]) for j in range(J)] for n in range(N)]   # [n][j][e]
        iterations.append({"b": b, "c": c, "s": s, "v": v})
        if t < n_iters - 1:
            updated = zeros(N, I, J)   # a new list: the old one belongs to the iteration that used it
            for n in range(N):
                for i in range(I):
                    for j in range(J):
                        agreement = sum(u_hat[n][i][j][e] * v[n][j][e] for e in range(E))
                        updated[n][i][j] = b[n][i][j] + agreement
            b = updated
    return iterations


def lengths(v):
    """Return the lengths |v_j| of the output capsules (2017, Section 3). Not differentiable where a capsule is 0."""
    # v: [n][j][e] -> [n][j]
    return [[sqrt(sum(x * x for x in v[n][j])) for j in range(len(v[n]))] for n in range(len(v))]


def margin_loss(lengths, present, upper=0.9, lower=0.1, absent_weight=0.5):
    """Return the margin loss (2017, Eq. 4), summed over the classes k and averaged over the samples.

    L_k = T_k max(0, m+ - |v_k|)^2 + lambda (1 - T_k) max(0, |v_k| - m-)^2

    lengths: |v_k|, [n][k]. present: T_k, [n][k], 1 where class k is present and 0 elsewhere; several classes may be
    present. upper, lower, absent_weight: m+, m- and lambda. The paper sums over k; it does not say how samples are
    combined, and the mean is the usual choice.
    """
    N, K = len(lengths), len(lengths[0])
    total = 0.0
    for n in range(N):
        for k in range(K):
            too_short = positive_part(upper - lengths[n][k])
            too_long = positive_part(lengths[n][k] - lower)
            total = total + present[n][k] * too_short * too_short
            total = total + absent_weight * (1 - present[n][k]) * too_long * too_long
    return total / N


def mask(v, labels):
    """Return the decoder's input: v with all capsules but the labeled one set to 0 (2017, Section 4.1).

    v: [n][j][e]. labels: [n], the index of one class. For two digits, call it once per digit.
    """
    N, J, E = len(v), len(v[0]), len(v[0][0])
    masked = zeros(N, J, E)   # [n][j][e]
    for n in range(N):
        for j in range(J):
            for e in range(E):
                masked[n][j][e] = v[n][j][e] if j == labels[n] else 0.0
    return masked


def reconstruction_loss(reconstructed, images):
    """Return the sum of squared differences of a sample's pixels (2017, Section 4.1), averaged over the samples.

    reconstructed, images: [n][pixel]. Not weighted; see `total_loss`.
    """
    total = 0.0
    for n in range(len(images)):
        for p in range(len(images[n])):
            difference = reconstructed[n][p] - images[n][p]
            total = total + difference * difference
    return total / len(images)


def total_loss(margin, reconstruction):
    """Return the margin loss plus 0.0005 times the reconstruction loss (2017, Section 4.1)."""
    return margin + RECONSTRUCTION_WEIGHT * reconstruction


# ---- EM routing (2018) ----

def matrix_votes(M, W):
    """Return the votes V_ij = M_i W_ij (2018, Section 2), pose times transformation matrix, vectorized row by row.

    The paper does not give the order of the entries; only `coordinate_addition` depends on it.
    """
    # M: [n][i][row][k]; W: [i][j][k][column]
    N, I, J, rows, K, columns = len(M), len(W), len(W[0]), len(M[0][0]), len(W[0][0]), len(W[0][0][0])
    V = zeros(N, I, J, rows * columns)   # [n][i][j][h], h = row * columns + column
    for n in range(N):
        for i in range(I):
            for j in range(J):
                for row in range(rows):
                    for column in range(columns):
                        V[n][i][j][row * columns + column] = sum(
                            M[n][i][row][k] * W[i][j][k][column] for k in range(K))
    return V


def scaled_positions(height, width):
    """Return ((row + 1/2) / height, (column + 1/2) / width) for every position of a grid, row by row.

    The paper says "scaled coordinate" without the scale. This one is common and puts the centers inside (0, 1).
    """
    return [[(row + 0.5) / height, (column + 0.5) / width] for row in range(height) for column in range(width)]


def coordinate_addition(V, positions):
    """Return the votes after coordinate addition (2018, Section 4).

    The scaled row of the center of child i's receptive field is added to the first element of the right-hand column of
    its 4x4 vote, the scaled column to the second.

    V: [n][i][j][h], h = 4 * row + column. positions: [i][2], scaled (row, column), as from `scaled_positions`.
    """
    N, I, J, H = len(V), len(V[0]), len(V[0][0]), len(V[0][0][0])
    if H != 16:
        raise ValueError(f"votes have {H} entries, but coordinate addition is defined for 4x4 votes, which have 16")
    added = zeros(N, I, J, H)   # [n][i][j][h]
    for n in range(N):
        for i in range(I):
            for j in range(J):
                for h in range(H):
                    added[n][i][j][h] = V[n][i][j][h]
                added[n][i][j][4 * 0 + 3] = V[n][i][j][4 * 0 + 3] + positions[i][0]
                added[n][i][j][4 * 1 + 3] = V[n][i][j][4 * 1 + 3] + positions[i][1]
    return added


def inverse_temperatures(n_iters, final=0.01):
    """Return lambda of every iteration t = 0, 1, ...: final (1 - 0.95^(t + 1)).

    2018 says that lambda "increases at each iteration with a fixed schedule" and does not give it. This schedule is
    that of the authors' code, with `final` 0.01.
    """
    return [final * (1 - 0.95 ** (t + 1)) for t in range(n_iters)]


def uniform_assignments(n_children, n_parents, connected=None):
    """Return the R_ij that EM routing starts from: 1 / (number of parents that child i votes for), [i][j].

    2018, Procedure 1, line 2 says 1 / |Omega_L+1|, the number of all parents. Without `connected` this is the same. In
    a convolutional layer a child votes only for some parents, and the paper does not say which number it means.
    """
    R = zeros(n_children, n_parents)   # [i][j]
    for i in range(n_children):
        voted = [j for j in range(n_parents) if connected is None or connected[i][j]]
        for j in voted:
            R[i][j] = 1.0 / len(voted)
    return R


def m_step(V, a, R, beta_u, beta_a, inverse_temperature, epsilon=0.0, mass_factor=1.0):
    """Compute mean, variance, cost and activation of every parent (2018, Procedure 1, M-STEP).

    Arguments as in `em_routing`, for one iteration; R: [n][i][j].
    Return mu, sigma2 and cost, [n][j][h], and the logit of the activation, lambda (beta_a - sum_h cost_h), [n][j].
    """
    N, I, J, H = len(V), len(V[0]), len(V[0][0]), len(V[0][0][0])
    mu, sigma2, cost = zeros(N, J, H), zeros(N, J, H), zeros(N, J, H)   # [n][j][h]
    logit = zeros(N, J)   # [n][j]
    for n in range(N):
        for j in range(J):
            r = [R[n][i][j] * a[n][i] for i in range(I)]   # line 2; [i]
            mass = sum(r)
            for h in range(H):
                mu[n][j][h] = sum(r[i] * V[n][i][j][h] for i in range(I)) / mass   # line 3
                spread = 0.0
                for i in range(I):
                    difference = V[n][i][j][h] - mu[n][j][h]
                    spread = spread + r[i] * difference * difference
                sigma2[n][j][h] = spread / mass + epsilon   # line 4
                log_sigma = log(sigma2[n][j][h]) / 2
                cost[n][j][h] = (beta_u[j] + log_sigma) * mass * mass_factor   # line 5
            logit[n][j] = inverse_temperature * (beta_a[j] - sum(cost[n][j]))   # line 6, inside the logistic
    return mu, sigma2, cost, logit


def log_density(x, mu, sigma2):
    """Return the log density of x under a normal distribution with diagonal covariance (2018, Procedure 1, E-STEP)."""
    # x, mu, sigma2: [h]
    total = 0.0
    for h in range(len(x)):
        difference = x[h] - mu[h]
        total = total - log(2 * math.pi * sigma2[h]) / 2 - difference * difference / (2 * sigma2[h])
    return total


def e_step(V, mu, sigma2, logit, connected=None):
    """Compute the assignments R_ij = a_j p_j / sum_k a_k p_k (2018, Procedure 1, E-STEP), from logarithms.

    V: [n][i][j][h]; mu, sigma2: [n][j][h]; logit: of a_j, [n][j]. connected: [i][j] or None, as in `em_routing`.
    Return R, [n][i][j].
    """
    N, I, J = len(V), len(V[0]), len(V[0][0])
    R = zeros(N, I, J)   # [n][i][j]
    for n in range(N):
        for i in range(I):
            voted = [j for j in range(J) if connected is None or connected[i][j]]
            log_ap = [log_logistic(logit[n][j]) + log_density(V[n][i][j], mu[n][j], sigma2[n][j]) for j in voted]
            shares = softmax(log_ap)   # exp(log_ap) / sum exp(log_ap)
            for k in range(len(voted)):
                R[n][i][voted[k]] = shares[k]
    return R


def em_routing(V, a, beta_u, beta_a, lambdas, epsilon=0.0, mass_factor=1.0, initial_R=None, connected=None,
               constant_assignments=False):
    """Compute poses and activations of the parents by EM routing (2018, Procedure 1), and keep every iteration.

    V: votes, [n][i][j][h]; the paper's have 16 entries h, here any number. a: activations of the children, [n][i], in
    [0, 1]. beta_u, beta_a: [j]. lambdas: inverse temperature of every iteration, [t]; its length is the number of
    iterations.

    What the paper leaves open, or other sources change, is an argument:
    lambdas               The paper says only that lambda increases from iteration to iteration. `inverse_temperatures`
                          gives the schedule of the authors' code.
    beta_u, beta_a        One number per parent. The paper says both "two learned biases per capsule" and that beta_a is
                          the same for all capsules; pass equal numbers to share them. Procedure 1, followed here, adds
                          beta_u once per entry h and leaves out the constant (1 + ln 2 pi) / 2 of Eq. 1; Eq. 2 counts
                          beta_u once. Both give the same activation if beta_u of Eq. 2 is
                          H (beta_u of Procedure 1 - (1 + ln 2 pi) / 2), for H entries.
    epsilon               Added to the variance. The paper has none, so that a parent with one child, or with equal
                          votes, has variance 0 and the logarithm fails. The authors' code adds 0.0005.
    mass_factor           Multiplies sum_i r_i in the cost. The paper has 1; Gritzman 2019 proposes parents / children,
                          which keeps the cost from growing with the number of children.
    initial_R             R of the first iteration, [i][j]. Default: `uniform_assignments`.
    connected             [i][j], true where child i votes for parent j. In a convolutional layer j runs over the parent
                          types of all positions, and a child's assignments sum to 1 over all of those it votes for.
                          Default: every child votes for every parent.
    constant_assignments  Take the assignments as constants in `gradient`. The authors write that they do not stop
                          gradients, so False is their gradient.

    A parent whose children all have r_ij = 0 has no mean: the division raises ZeroDivisionError, as in the paper.

    Return a list with one dict per iteration: R, [n][i][j], the assignments that the iteration's M-step used, before
    they are multiplied by a_i; mu, sigma2 and cost, [n][j][h]; logit and a, [n][j]; R_next, [n][i][j], of the E-step
    that follows. Procedure 1 ends with an E-step, too, whose R changes neither pose nor activation.
    """
    if not lambdas:
        raise ValueError("lambdas is empty, but EM routing needs at least 1 iteration; pass one number per iteration")
    N, I, J = len(V), len(V[0]), len(V[0][0])
    if initial_R is None:
        initial_R = uniform_assignments(I, J, connected)
    R = zeros(N, I, J)   # [n][i][j]
    for n in range(N):
        for i in range(I):
            for j in range(J):
                R[n][i][j] = initial_R[i][j]
    iterations = []
    for t in range(len(lambdas)):
        mu, sigma2, cost, logit = m_step(V, a, R, beta_u, beta_a, lambdas[t], epsilon, mass_factor)
        activation = zeros(N, J)   # [n][j]
        for n in range(N):
            for j in range(J):
                activation[n][j] = logistic(logit[n][j])
        R_next = e_step(V, mu, sigma2, logit, connected)
        if constant_assignments:
            R_next = real(R_next)
        iterations.append({"R": R, "mu": mu, "sigma2": sigma2, "cost": cost, "logit": logit, "a": activation,
                           "R_next": R_next})
        R = R_next
    return iterations


def spread_loss(a, labels, m):
    """Return the spread loss sum_{i != t} max(0, m - (a_t - a_i))^2 (2018, Eq. 3), averaged over the samples.

    a: activations of the classes, [n][class]. labels: t, [n]. m: margin, which the paper raises from 0.2 to 0.9 during
    training. The paper does not say how samples are combined; the mean is the usual choice.
    """
    total = 0.0
    for n in range(len(a)):
        for i in range(len(a[n])):
            if i != labels[n]:
                short = positive_part(m - (a[n][labels[n]] - a[n][i]))
                total = total + short * short
    return total / len(a)
