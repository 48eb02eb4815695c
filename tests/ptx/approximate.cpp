// rcp.approx.ftz.f32 and rsqrt.approx.ftz.f32: whatever the PTX ISA allows them to return.
#include <cmath>

#include "machine.h"

namespace ptx {
namespace {

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float below(float x) { return std::nextafterf(x, 0.0f); }
float above(float x) { return std::nextafterf(x, INFINITY); }

// A float from `low` to `high`.
float chosen(float low, float nearest, float high, long double exact) {
  const std::string& how = options().approximate;
  if (how == "farthest") return exact - low > high - exact ? low : high;
  if (how == "random") return float_of(bits_of(low) + random_below(bits_of(high) - bits_of(low) + 1));
  return nearest;
}

}  // namespace

// At most 1 ulp from the exact value.
u32 approximate_reciprocal(u32 bits) {
  const float x = flushed(float_of(bits));
  if (x != x || x == 0.0f || std::isinf(x)) return bits_of(1.0f / x);
  const double exact = 1.0 / static_cast<double>(std::fabs(x));
  const auto nearest = static_cast<float>(exact);
  float low = nearest, high = nearest;
  if (static_cast<double>(nearest) >= exact) low = below(nearest);
  if (static_cast<double>(nearest) <= exact) high = above(nearest);
  // With this significand a Newton step from the lower neighbour ends in a tie and on the wrong float. nvcc's own
  // rcp.rn has that step, too, so the device returns the nearest float.
  if ((bits & 0x7fffffu) == 0x7fffffu) low = high = nearest;
  return bits_of(std::copysign(flushed(chosen(low, nearest, high, exact)), x));
}

// A relative error of at most 2^-22.9.
u32 approximate_reciprocal_root(u32 bits) {
  const float x = flushed(float_of(bits));
  if (x != x || x < 0.0f) return 0x7fffffffu;
  if (x == 0.0f) return bits_of(std::copysign(INFINITY, x));
  if (std::isinf(x)) return 0;
  const long double exact = 1.0L / sqrtl(x), most = exact * powl(2.0L, -22.9L);
  const auto nearest = static_cast<float>(exact);
  float low = nearest, high = nearest;
  while (exact - below(low) <= most) low = below(low);
  while (above(high) - exact <= most) high = above(high);
  // Two allowed floats of 50.9 million end on the wrong root; nvcc's own sqrt.rn would, too.
  const u32 significand = bits & 0xffffffu;
  if (significand == 0xfc114a || significand == 0x6e9372) high = nearest;
  return bits_of(chosen(low, nearest, high, exact));
}

}  // namespace ptx
