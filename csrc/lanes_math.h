// exp and the normal distribution over vectors of floats. Included after the vectors, inside the namespace and target
// options of an instruction set.

struct FloatMathLanes : FloatLanes {
  // e^x = 2^n e^r with |r| <= ln(2) / 2, of which the Taylor series to r^6 is exact to 1e-7.
  static F exp(F x) {
    x = clamp(x, -104.0f, 89.0f);  // beyond: 0 and inf
    const F n = round(mul(x, set(1.44269504088896341f)));
    F r = fma(n, set(-0.693359375f), x);  // ln(2) in two parts: the product with the first is exact
    r = fma(n, set(2.12194440e-4f), r);
    F p = set(1.3981999507e-3f);
    for (const float c : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = fma(p, r, set(c));
    p = add(fma(mul(p, r), r, r), set(1.0f));
    return times_power_of_two(p, n);
  }

  // The probability that a normal variable is below x, to a relative error of 5e-7 in both tails, and its density at x.
  // P(-a) = e^(-a^2 / 2) q(t) with t = 1 / (1 + 0.27 a); q was fitted to the scaled complementary error function on
  // [0, 16] with relative error 2.5e-8, and one exponential serves both results.
  static F normal_cdf(F x, F* density) {
    const F a = abs(x);
    const F t = div(set(1.0f), fma(a, set(0.27f), set(1.0f)));
    const F e = exp(mul(mul(a, a), set(-0.5f)));
    F q = set(0.02903837f);
    for (const float c : {-0.1268736f, 0.17061525f, -0.07019505f, 0.10853337f, 0.07173487f, 0.10189491f, 0.10753047f,
                          0.10772142f}) {
      q = fma(q, t, set(c));
    }
    const F tail = mul(mul(q, t), e);
    *density = mul(e, set(0.3989422804f));
    return if_negative(x, tail, sub(set(1.0f), tail));
  }
};
