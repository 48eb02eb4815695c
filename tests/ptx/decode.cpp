// The effect of each instruction of PTX. An instruction or modifier that is not listed here ends the parser.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <functional>

#include "arithmetic.h"

namespace ptx {
namespace {

// An instruction while it is being decoded.
struct Decoding {
  Parser& parser;
  Instruction& i;
  const std::vector<std::string>& op;    // "ld", "global", "u32"
  const std::vector<std::string>& args;  // operands
  std::string base, type, flat;          // flat: without the type
  int bits = 0;                          // of the type
  bool wide = false;                     // of 64 bits

  bool has(const char* part) const { return std::count(op.begin(), op.end(), part) > 0; }
  [[noreturn]] void fail() const { parser.fail("unknown instruction: " + i.text); }
  void demand(bool known) const {
    if (!known) fail();
  }
  const std::string& arg(size_t k) const {
    demand(k < args.size());
    return args[k];
  }
  void to(const std::string& s, bool is_wide) { i.to[i.targets++] = parser.operand(s, is_wide); }
  void from(const std::string& s, bool is_wide) { i.from[i.sources++] = parser.operand(s, is_wide); }
  // A result and n operands, all of the type.
  void operands(size_t n, bool is_wide) {
    demand(args.size() == n + 1);
    to(args[0], is_wide);
    for (size_t k = 1; k <= n; ++k) from(args[k], is_wide);
  }
  void set(Handler handler) {
    demand(handler != nullptr);
    i.handler = handler;
  }
};

// The operands within "{a, b}".
std::vector<std::string> inner(const std::string& s) { return split_operands(s.substr(1, s.size() - 2)); }

// f(zero) with a zero of the integer type, "s32" or "u32"; "b32" is as "u32".
template <class F>
Handler of_integers(const std::string& type, F f) {
  if (type == "s16") return f(i16{});
  if (type == "u16" || type == "b16") return f(u16{});
  if (type == "s32") return f(i32{});
  if (type == "u32" || type == "b32") return f(u32{});
  if (type == "s64") return f(i64{});
  if (type == "u64" || type == "b64") return f(u64{});
  return nullptr;
}

// f(zero) with a zero of the unsigned type of this size, for types of which only the size matters.
template <class F>
Handler of_sizes(int bits, F f) {
  return bits == 16 ? f(u16{}) : bits == 32 ? f(u32{}) : bits == 64 ? f(u64{}) : nullptr;
}

void control(Decoding& d) {
  if (d.base == "bra") {
    d.i.kind = Kind::kBranch;
    d.parser.add_jump(d.arg(0));
  } else if (d.base == "call") {
    d.i.kind = Kind::kCall;
    size_t k = 0;
    const std::string result = d.arg(0)[0] == '(' ? inner(d.args[k++]).at(0) : "";
    const std::string callee = d.arg(k++);
    d.i.call = d.parser.add_call(result, callee, k < d.args.size() ? inner(d.args[k]) : std::vector<std::string>());
  } else {
    d.demand(d.base == "ret" || d.parser.f.is_kernel);
    d.i.kind = Kind::kReturn;
  }
}

void barrier(Decoding& d) {
  if (d.flat == "bar.warp") {
    d.i.kind = Kind::kWarpExchange;
    d.i.members = d.parser.operand(d.arg(0), false);
    return d.set([](Warp& w, const Instruction&, u32) { ++w.epoch; });
  }
  d.demand(d.args.size() == 1 && d.args[0] == "0");
  d.i.kind = Kind::kBarrier;
}

// shfl.sync.bfly: each lane reads from the one whose number differs in some bits.
void shuffle(Warp& w, const Instruction& i, u32 mask) {
  u32 values[kWarp], undefined = 0;
  for_lanes(mask, [&](int lane) {
    const u32 other = static_cast<u32>(lane) ^ (w.read32(i.from[1])[lane] & 31);
    if (!(mask >> other & 1)) w.report("an exchange reads from a lane that does not take part", i);
    if (w.read32(i.from[2])[lane] != kWarp - 1) w.report("an exchange within a part of a warp", i);
    values[lane] = w.read32(i.from[0])[other];
    undefined |= (w.undefined(i.from[0]) >> other & 1) << lane;
  });
  for_lanes(mask, [&](int lane) { w.write32(i.to[0])[lane] = values[lane]; });
  w.mark(i.to[0], undefined, mask);
  if (i.targets == 1) return;
  w.set_predicate(i.to[1], kAllLanes, mask);
  w.mark(i.to[1], 0, mask);
}

void vote(Warp& w, const Instruction& i, u32 mask) {
  if (w.undefined(i.from[0]) & mask) w.report("a vote on something undefined", i);
  const u32 yes = w.predicate(i.from[0]) & mask;
  const bool passed = i.immediate ? yes != 0 : yes == mask;
  counters().agreements += passed && !i.immediate;
  w.set_predicate(i.to[0], passed ? kAllLanes : 0, mask);
  w.mark(i.to[0], 0, mask);
}

void exchange(Decoding& d) {
  d.i.kind = Kind::kWarpExchange;
  d.i.marks = true;
  if (d.base == "vote") {
    d.demand(d.flat == "vote.sync.all" || d.flat == "vote.sync.any");
    d.i.immediate = d.has("any");
    d.to(d.arg(0), false);
    d.from(d.arg(1), false);
    d.i.members = d.parser.operand(d.arg(2), false);
    return d.set(vote);
  }
  d.demand(d.flat == "shfl.sync.bfly");
  const size_t bar = d.arg(0).find('|');
  d.to(trimmed(d.args[0].substr(0, bar)), false);
  if (bar != std::string::npos) d.to(trimmed(d.args[0].substr(bar + 1)), false);
  for (size_t k = 1; k <= 3; ++k) d.from(d.arg(k), false);
  d.i.members = d.parser.operand(d.arg(4), false);
  d.set(shuffle);
}

void asynchronous(Decoding& d) {
  d.i.marks = true;
  d.demand(d.has("async"));
  if (d.has("commit_group")) return d.set(commit_copies);
  if (d.has("wait_group")) {
    d.i.immediate = static_cast<u32>(std::atoi(d.arg(0).c_str()));
    return d.set(wait_for_copies);
  }
  d.demand(d.op.size() == 5 && d.op[3] == "shared" && d.op[4] == "global" && d.args.size() <= 4);
  d.i.from[0] = d.parser.address(d.arg(0), &d.i.offset);
  d.i.from[1] = d.parser.address(d.arg(1), &d.i.source_offset);
  d.i.bytes = static_cast<u32>(std::atoi(d.arg(2).c_str()));
  d.i.immediate = d.args.size() > 3 ? static_cast<u32>(std::atoi(d.args[3].c_str())) : d.i.bytes;
  d.demand(d.i.bytes == 16 || (d.op[2] == "ca" && (d.i.bytes == 4 || d.i.bytes == 8)));
  d.demand(d.i.immediate <= d.i.bytes);
  d.set(begin_copy);
}

void memory(Decoding& d) {
  Instruction& i = d.i;
  i.marks = true;
  i.bytes = static_cast<u32>(d.bits / 8);
  const std::map<std::string, Space> spaces{
      {"global", Space::kGlobal}, {"shared", Space::kShared}, {"local", Space::kLocal}, {"param", Space::kParameter}};
  for (size_t k = 1; k + 1 < d.op.size(); ++k) {
    const std::string& part = d.op[k];
    if (spaces.count(part)) {
      i.space = spaces.at(part);
    } else if (part == "v2" || part == "v4") {
      i.count = part == "v2" ? 2 : 4;
    } else {
      const std::vector<std::string> caching{"cs", "nc", "ca", "cg", "wb"};
      d.demand(std::count(caching.begin(), caching.end(), part) ||
               (d.base == "atom" && (part == "add" || part == "max")));
    }
  }
  if (d.base == "atom") {
    d.demand(d.type == "u64" && (d.has("add") || d.has("max")) && i.space == Space::kGlobal);
    d.to(d.arg(0), true);
    i.from[i.sources++] = d.parser.address(d.arg(1), &i.offset);
    d.from(d.arg(2), true);
    i.immediate = d.has("max");
    return d.set(atomic);
  }
  const bool is_load = d.base == "ld";
  const std::string& value = d.arg(is_load ? 0 : 1);
  const std::vector<std::string> elements = value[0] == '{' ? inner(value) : std::vector<std::string>{value};
  d.demand(elements.size() == i.count);
  i.from[i.sources++] = d.parser.address(d.arg(is_load ? 1 : 0), &i.offset);
  for (const std::string& element : elements) is_load ? d.to(element, d.wide) : d.from(element, d.wide);
  i.extends_sign = d.type[0] == 's';
  d.set(is_load ? load_memory : store_memory);
}

// mov of two halves into a register: "mov.b32 %r1, {%rs1, %rs2};".
template <class T>
void join(Warp& w, const Instruction& i, u32 mask) {
  constexpr int kHalf = 4 * sizeof(T);
  const u32 *low = w.read32(i.from[0]), *high = w.read32(i.from[1]);
  auto* to = write<T>(w, i.to[0]);
  for_lanes(mask, [&](int l) { to[l] = static_cast<T>(high[l]) << kHalf | (low[l] & (~T{0} >> kHalf)); });
}

template <class T>
void part(Warp& w, const Instruction& i, u32 mask) {
  constexpr int kHalf = 4 * sizeof(T);
  for_lanes(mask, [&](int l) {
    const T value = read<T>(w, i.from[0])[l];
    for (int k = 0; k < 2; ++k)
      if (i.to[k].bank == Bank::kBits32)
        w.write32(i.to[k])[l] = static_cast<u32>(value >> (k * kHalf) & (~T{0} >> kHalf));
  });
}

template <class F>
Handler special(F) {
  return [](Warp& w, const Instruction& i, u32 mask) {
    for_lanes(mask, [&](int lane) { w.write32(i.to[0])[lane] = F{}(w, lane); });
  };
}

void move(Decoding& d) {
  const std::string &to = d.arg(0), &from = d.arg(1);
  if (from[0] == '{' || to[0] == '{') {
    const std::vector<std::string> halves = inner(from[0] == '{' ? from : to);
    d.demand(halves.size() == 2 && (d.bits == 32 || d.bits == 64));
    if (from[0] == '{') {
      d.to(to, d.wide);
      for (const std::string& half : halves) d.from(half, false);
      return d.set(d.wide ? join<u64> : join<u32>);
    }
    for (const std::string& half : halves) d.to(half, false);
    d.from(from, d.wide);
    return d.set(d.wide ? part<u64> : part<u32>);
  }
  d.to(to, d.wide);
  if (from == "%tid.x") return d.set(special([](const Warp& w, int lane) { return w.thread(lane); }));
  if (from == "%ntid.x") return d.set(special([](const Warp& w, int) { return w.block.threads; }));
  if (from == "%ctaid.x") return d.set(special([](const Warp& w, int) { return w.block.index; }));
  d.from(from, d.wide);
  if (d.type == "pred") {
    return d.set([](Warp& w, const Instruction& i, u32 mask) {
      const bool is_register = i.from[0].bank == Bank::kPredicate;
      w.set_predicate(i.to[0], is_register ? w.predicate(i.from[0]) : w.read32(i.from[0])[0] ? kAllLanes : 0, mask);
    });
  }
  d.set(of_sizes(d.bits, [&](auto zero) { return bitwise<decltype(zero)>("mov"); }));
}

template <class T>
void select(Warp& w, const Instruction& i, u32 mask) {
  const auto *a = read<T>(w, i.from[0]), *b = read<T>(w, i.from[1]);
  const u32 p = w.predicate(i.from[2]);
  const u32 undefined = w.undefined(i.from[2]) | (w.undefined(i.from[0]) & p) | (w.undefined(i.from[1]) & ~p);
  auto* to = write<T>(w, i.to[0]);
  for_lanes(mask, [&](int l) { to[l] = p >> l & 1 ? a[l] : b[l]; });
  w.mark(i.to[0], undefined, mask);
}

void choice(Decoding& d) {
  if (d.base == "setp") {
    d.demand(d.op.size() == 3 && d.args.size() == 3);
    d.to(d.args[0], false);
    d.from(d.args[1], d.wide);
    d.from(d.args[2], d.wide);
    if (d.type == "f32") return d.set(comparison<float>(d.op[1]));
    if (d.type == "f64") return d.set(comparison<double>(d.op[1]));
    return d.set(of_integers(d.type, [&](auto zero) { return comparison<decltype(zero)>(d.op[1]); }));
  }
  d.i.marks = true;
  d.to(d.arg(0), d.wide);
  for (size_t k = 1; k <= 3; ++k) d.from(d.arg(k), d.wide && k < 3);
  d.set(d.wide ? select<u64> : select<u32>);
}

template <class F>
Handler of_predicates(F) {
  return [](Warp& w, const Instruction& i, u32 mask) {
    w.set_predicate(i.to[0], F{}(w.predicate(i.from[0]), w.predicate(i.from[i.sources - 1])), mask);
  };
}

void logic(Decoding& d) {
  d.operands(d.base == "not" ? 1 : 2, d.wide);
  if (d.type != "pred") return d.set(of_sizes(d.bits, [&](auto zero) { return bitwise<decltype(zero)>(d.base); }));
  if (d.base == "and") return d.set(of_predicates([](u32 a, u32 b) { return a & b; }));
  if (d.base == "or") return d.set(of_predicates([](u32 a, u32 b) { return a | b; }));
  d.demand(d.base == "not");
  d.set(of_predicates([](u32 a, u32) { return ~a; }));
}

void shifts(Decoding& d) {
  d.demand(d.args.size() == 3);
  d.to(d.args[0], d.wide);
  d.from(d.args[1], d.wide);
  d.from(d.args[2], false);
  d.set(of_integers(d.type, [&](auto zero) { return shift<decltype(zero)>(d.base == "shl"); }));
}

template <class T>
void insert_field(Warp& w, const Instruction& i, u32 mask) {
  const auto *field = read<T>(w, i.from[0]), *into = read<T>(w, i.from[1]);
  const u32 *at = w.read32(i.from[2]), *length = w.read32(i.from[3]);
  auto* to = write<T>(w, i.to[0]);
  for_lanes(mask, [&](int l) { to[l] = inserted_field<T>(field[l], into[l], at[l], length[l]); });
}

// Parts of words.
void parts(Decoding& d) {
  if (d.base == "bfi") {
    d.to(d.arg(0), d.wide);
    for (size_t k = 1; k <= 4; ++k) d.from(d.arg(k), d.wide && k < 3);
    return d.set(d.wide ? insert_field<u64> : insert_field<u32>);
  }
  d.demand(d.bits == 32);
  d.operands(3, false);
  if (d.base == "prmt") {
    d.demand(d.op.size() == 2);
    return d.set(ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 s) { return permuted(a, b, s); }));
  }
  d.demand(d.type == "u32");
  if (d.base == "bfe")
    return d.set(ternary<u32, u32, u32, u32>([](u32 a, u32 at, u32 n) { return extracted_field(a, at, n); }));
  d.demand(d.op.size() == 3 && d.op[1] == "u32");
  d.set(ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 sum) {
    for (int k = 0; k < 32; k += 8) sum += (a >> k & 0xff) * (b >> k & 0xff);
    return sum;
  }));
}

// Integers of the type's size and sign, in registers that may have another size.
template <class To, class From>
void convert_integers(Warp& w, const Instruction& i, u32 mask) {
  for_lanes(mask, [&](int lane) {
    const auto x = static_cast<To>(static_cast<From>(w.value(i.from[0], lane)));
    if (i.to[0].bank == Bank::kBits64) {
      w.write64(i.to[0])[lane] = static_cast<u64>(x);
    } else {
      w.write32(i.to[0])[lane] = static_cast<u32>(x) & (i.to[0].half ? 0xffffu : ~0u);
    }
  });
}

template <class From>
Handler integers_from(const std::string& to) {
  if (to == "s8") return convert_integers<int8_t, From>;
  if (to == "u8") return convert_integers<u8, From>;
  return of_integers(to, [](auto zero) -> Handler { return convert_integers<decltype(zero), From>; });
}

void conversion(Decoding& d) {
  d.demand(d.op.size() >= 3 && !d.has("ftz") && d.args.size() == (d.has("bf16x2") ? 3 : 2));
  const std::string& target = d.op[d.op.size() - 2];
  d.to(d.args[0], target.substr(1) == "64");
  for (size_t k = 1; k < d.args.size(); ++k) d.from(d.args[k], d.wide);
  if (d.op.size() == 3 && target[0] != 'f' && d.type[0] != 'f') {
    if (d.type == "s8") return d.set(integers_from<int8_t>(target));
    if (d.type == "u8") return d.set(integers_from<u8>(target));
    return d.set(of_integers(d.type, [&](auto zero) { return integers_from<decltype(zero)>(target); }));
  }
  static const std::map<std::string, Handler> known{
      {"rn.bf16x2.f32", binary<u32, u32, u32>([](u32 a, u32 b) { return bfloat16_of(a) << 16 | bfloat16_of(b); })},
      {"sat.f32.f32", unary<float, float>([](float a) { return a > 0.0f ? a < 1.0f ? a : 1.0f : 0.0f; })},
      {"f64.f32", unary<double, float>([](float a) { return a; })},
      {"rn.f32.f64", unary<float, double>([](double a) { return a; })},
      {"rn.f32.s16", unary<float, i16>([](i16 a) { return a; })},
      {"rn.f32.u16", unary<float, u16>([](u16 a) { return a; })},
      {"rn.f32.s32", unary<float, i32>([](i32 a) { return a; })},
      {"rn.f32.u32", unary<float, u32>([](u32 a) { return a; })},
      {"rn.f64.u64", unary<double, u64>([](u64 a) { return a; })},
      {"rzi.s32.f32", to_integer<i32, float>()},
      {"rzi.u64.f32", to_integer<u64, float>()},
      {"rzi.s64.f64", to_integer<i64, double>()},
  };
  const auto found = known.find(d.flat.substr(4) + "." + d.type);
  d.demand(found != known.end());
  d.set(found->second);
}

void approximation(Decoding& d) {
  d.operands(1, false);
  d.demand(d.flat == d.base + ".approx.ftz" && d.type == "f32");
  d.set(d.base == "rcp" ? unary<u32, u32>([](u32 a) { return approximate_reciprocal(a); })
                        : unary<u32, u32>([](u32 a) { return approximate_reciprocal_root(a); }));
}

void wide_product(Decoding& d) {
  d.demand(d.flat == "mul.wide");
  d.to(d.arg(0), d.bits == 32);
  d.from(d.arg(1), false);
  d.from(d.arg(2), false);
  if (d.type == "s16") return d.set(binary<i32, i16, i16>([](i16 a, i16 b) { return i32{a} * b; }));
  if (d.type == "u16") return d.set(binary<u32, u16, u16>([](u16 a, u16 b) { return u32{a} * b; }));
  if (d.type == "s32") return d.set(binary<i64, i32, i32>([](i32 a, i32 b) { return i64{a} * b; }));
  d.demand(d.type == "u32");
  d.set(binary<u64, u32, u32>([](u32 a, u32 b) { return u64{a} * b; }));
}

// Products and sums have to say .rn: without, ptxas may fuse them, and the CPU's bits would be lost.
void arithmetic(Decoding& d) {
  if (d.has("approx")) return approximation(d);
  if (d.has("wide")) return wide_product(d);
  const bool is_unary = d.base == "neg" || d.base == "abs" || d.base == "rcp" || d.base == "sqrt";
  d.operands(is_unary ? 1 : d.base == "mad" || d.base == "fma" ? 3 : 2, d.wide);
  if (d.type == "f32") return d.set(floating<float>(d.flat));
  if (d.type == "f64") return d.set(floating<double>(d.flat));
  d.set(of_integers(d.type, [&](auto zero) { return integer<decltype(zero)>(d.flat); }));
}

const std::map<std::string, void (*)(Decoding&)>& decoders() {
  static const std::map<std::string, void (*)(Decoding&)> made = [] {
    std::map<std::string, void (*)(Decoding&)> all;
    const auto add = [&](void (*decoder)(Decoding&), std::initializer_list<const char*> names) {
      for (const char* name : names) all[name] = decoder;
    };
    add(control, {"bra", "call", "ret", "exit"});
    add(barrier, {"bar", "barrier"});
    add(exchange, {"shfl", "vote"});
    add(asynchronous, {"cp"});
    add(memory, {"ld", "st", "atom"});
    add(move, {"mov"});
    add(choice, {"setp", "selp"});
    add(logic, {"and", "or", "xor", "not"});
    add(shifts, {"shl", "shr"});
    add(parts, {"bfi", "bfe", "prmt", "dp4a"});
    add(conversion, {"cvt"});
    add(arithmetic,
        {"add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "neg", "abs", "rcp", "sqrt", "rsqrt"});
    // Generic addresses are those of global memory, in which all of these kernels' pointers are.
    add(
        [](Decoding& d) {
          d.demand(d.has("global"));
          d.operands(1, true);
          d.set(bitwise<u64>("mov"));
        },
        {"cvta"});
    return all;
  }();
  return made;
}

}  // namespace

void Parser::decode(Instruction& i, const std::vector<std::string>& op, const std::vector<std::string>& args) {
  Decoding d{*this, i, op, args, op.front(), op.back(), op.front()};
  for (size_t k = 1; k + 1 < op.size(); ++k) d.flat += "." + op[k];
  const size_t digits = d.type.find_first_of("0123456789");
  d.bits = digits == std::string::npos ? 0 : std::atoi(d.type.c_str() + digits);
  d.wide = d.bits == 64;
  const auto decoder = decoders().find(d.base);
  if (decoder == decoders().end()) d.fail();
  decoder->second(d);
}

}  // namespace ptx
