// PTX as the interpreter has it: modules of functions, parsed when a kernel is first launched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;
// Addresses of shared memory begin here, those of a frame's parameters there: 0 is no address of either.
constexpr u32 kSharedBase = 1024;
constexpr u64 kFrameParameters = 1 << 20;

enum class Bank : u8 { kNone, kBits32, kBits64, kPredicate, kConstant32, kConstant64, kSink };

struct Operand {
  Bank bank = Bank::kNone;
  bool negated = false;  // a predicate
  bool half = false;     // a register of 16 bits
  int index = 0;

  bool wide() const { return bank == Bank::kBits64 || bank == Bank::kConstant64; }
};

enum class Space : u8 { kGlobal, kShared, kLocal, kParameter };
enum class Kind : u8 { kPlain, kBranch, kReturn, kCall, kBarrier, kWarpExchange };

struct Warp;
struct Instruction;
// Executes an instruction for the lanes of the mask.
using Handler = void (*)(Warp&, const Instruction&, u32 mask);

struct Instruction {
  Handler handler = nullptr;
  Kind kind = Kind::kPlain;
  bool marks = false;  // the handler itself marks which of its results are undefined
  bool guard_negated = false;
  int guard = -1;  // a predicate
  int targets = 0, sources = 0;
  Operand to[4], from[5];
  Operand members;  // of a warp's exchange
  Space space = Space::kGlobal;
  u32 bytes = 0, count = 1;  // of an element in memory, and how many elements
  bool extends_sign = false;
  i64 offset = 0, source_offset = 0;  // bytes; the second one is of asynchronous copies
  u32 immediate = 0;
  int target = -1;  // of a branch
  int call = -1;    // an index in Function::calls
  int line = 0;
  std::string text;
};

// A variable's place in its space.
struct Variable {
  int offset = 0, bytes = 0;
};

struct Function;
struct Call {
  Function* function = nullptr;
  std::vector<Variable> arguments;
  Variable result;
};

struct Module;
struct Function {
  std::string name;
  Module* module = nullptr;
  bool is_kernel = false, is_parsed = false;
  size_t begin = 0, end = 0;  // its text, from the name on
  int first_line = 0;
  int threads = 0;  // .maxntid, 0 for none
  int count32 = 0, count64 = 0, predicates = 0;
  std::vector<u32> constants32;  // each once per lane, like registers
  std::vector<u64> constants64;
  std::vector<Instruction> code;
  std::vector<Call> calls;
  std::vector<Variable> parameters;
  Variable result;
  int parameter_bytes = 0;  // of its own parameters and result, and of those of its calls
  int local_bytes = 0;
  int static_shared = 0;  // bytes
  bool uses_dynamic_shared = false;

  int dynamic_offset() const { return (static_shared + 15) / 16 * 16; }
};

struct Module {
  std::string text;
  std::map<std::string, Function> functions;
  std::vector<std::string> dynamic_shared;  // names of extern shared arrays
};

// Reads modules in place of earlier ones. Throws std::runtime_error for what it does not know, here or in find_kernel.
void load(const std::vector<std::string>& texts);

// The kernel of this name, parsed; nullptr if there is none.
Function* find_kernel(const std::string& name);

// parse.cpp and decode.cpp
std::string trimmed(const std::string& s);
std::vector<std::string> split_operands(const std::string& s);

// The function that is being parsed, as decode() needs it.
struct Parser {
  explicit Parser(Function& function) : f(function) {}
  void parse();

  // wide: whether a constant has 64 bits.
  Operand operand(const std::string& s, bool wide);
  // "[base+offset]"
  Operand address(const std::string& s, i64* offset);
  // Fills in an instruction from its parts, "ld.global.u32" and "%r1", "[%rd2]".
  void decode(Instruction& i, const std::vector<std::string>& op, const std::vector<std::string>& args);
  // name: as in "call".
  int add_call(const std::string& result, const std::string& callee, const std::vector<std::string>& arguments);
  void add_jump(const std::string& label) { jumps[static_cast<int>(f.code.size())] = label; }
  [[noreturn]] void fail(const std::string& what) const;

  Function& f;

 private:
  struct Registers {
    Bank bank = Bank::kBits32;
    int first = 0;
    bool half = false;
  };
  void head();
  void body(size_t open);
  void declaration(const std::string& s);
  void statement(const std::string& s, int line);
  Operand constant(u64 value, bool wide);
  bool find_register(const std::string& s, Operand* found) const;

  std::map<std::string, Registers> banks;      // "%r" of "%r7"
  std::map<std::string, u64> symbols;          // addresses
  std::map<std::string, Variable> parameters;  // in the frame
  std::map<std::string, int> labels;
  std::map<int, std::string> jumps;
  std::map<int, std::string> callees;
  std::map<std::pair<bool, u64>, int> constants;
  std::vector<Operand> dynamic_addresses;  // constants that become the dynamic memory's address
};

}  // namespace ptx
