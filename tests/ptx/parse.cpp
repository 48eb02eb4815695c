// Reads PTX: finds a module's functions, and parses them when they are first needed.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "program.h"

namespace ptx {
namespace {

std::vector<std::unique_ptr<Module>> modules;

bool begins(const std::string& s, const char* with) { return s.rfind(with, 0) == 0; }

std::vector<std::string> words(const std::string& s) {
  std::istringstream in(s);
  std::vector<std::string> found;
  for (std::string word; in >> word;) found.push_back(word);
  return found;
}

int bytes_of(const std::string& type) { return std::atoi(type.c_str() + (type[0] == '.' ? 2 : 1)) / 8; }

// A declaration without its space: ".align 8 .b8 name[16]", ".u64 .ptr .global .align 4 name". Placed at `end`.
Variable place(const std::string& text, std::string* name, int* end) {
  int align = 1, bytes = 1, count = 1;
  const std::vector<std::string> all = words(text);
  const bool is_pointer = std::count(all.begin(), all.end(), ".ptr") > 0;  // .align is of what it points to
  for (size_t k = 0; k < all.size(); ++k) {
    if (all[k] == ".align") {
      ++k;
      if (!is_pointer) align = std::atoi(all[k].c_str());
    } else if (all[k] == ".ptr") {
      if (!begins(all[k + 1], ".align")) ++k;
    } else if (all[k][0] == '.') {
      bytes = bytes_of(all[k]);
      align = std::max(align, bytes);
    } else {
      *name = all[k];
    }
  }
  if (const size_t open = name->find('['); open != std::string::npos) {
    count = std::atoi(name->c_str() + open + 1);
    name->resize(open);
  }
  const Variable placed{(*end + align - 1) / align * align, bytes * count};
  *end = placed.offset + placed.bytes;
  return placed;
}

std::string without_comments(const std::string& text) {
  std::string kept;
  for (size_t at = 0; at < text.size();) {
    const size_t comment = std::min(text.find("//", at), text.size());
    kept.append(text, at, comment - at);
    at = std::min(text.find('\n', comment), text.size());
  }
  return kept;
}

int lines(const std::string& text, size_t begin, size_t end) {
  return static_cast<int>(
      std::count(text.begin() + static_cast<i64>(begin), text.begin() + static_cast<i64>(end), '\n'));
}

// The end of a function that begins at `at`: after its closing brace, or after its semicolon if it has no body.
size_t end_of_function(const std::string& text, size_t at) {
  int depth = 0;
  for (; at < text.size(); ++at) {
    if (text[at] == ';' && depth == 0) return at + 1;
    if (text[at] == '{') ++depth;
    if (text[at] == '}' && --depth == 0) return at + 1;
  }
  throw std::runtime_error("ptx: a function without an end");
}

void find_functions(Module& module) {
  const std::string& text = module.text;
  int line = 1;
  for (size_t at = 0, next; at < text.size(); line += lines(text, at, next), at = next) {
    next = std::min(text.find('\n', at), text.size() - 1) + 1;
    std::string rest = trimmed(text.substr(at, next - at));
    if (begins(rest, ".extern .shared")) {
      int end = 0;
      module.dynamic_shared.emplace_back();
      place(rest.substr(15, rest.find(';') - 15), &module.dynamic_shared.back(), &end);
      continue;
    }
    for (const char* linkage : {".visible ", ".weak ", ".extern "})
      if (begins(rest, linkage)) rest = rest.substr(rest.find(' ') + 1);
    if (!begins(rest, ".entry") && !begins(rest, ".func")) {
      if (rest[0] == '.' && !begins(rest, ".version") && !begins(rest, ".target") && !begins(rest, ".address_size"))
        throw std::runtime_error("ptx: unknown directive of a module: " + rest);
      continue;
    }
    Function f;
    f.module = &module;
    f.is_kernel = begins(rest, ".entry");
    f.begin = text.find(f.is_kernel ? ".entry" : ".func", at) + (f.is_kernel ? 6 : 5);
    f.first_line = line;
    next = f.end = end_of_function(text, f.begin);
    std::string head = trimmed(text.substr(f.begin, text.find_first_of("{;", f.begin) - f.begin));
    if (head[0] == '(') head = trimmed(head.substr(head.find(')') + 1));
    f.name = head.substr(0, head.find_first_of("( \t\n"));
    if (text[f.end - 1] == '}') module.functions[f.name] = f;
  }
}

}  // namespace

std::string trimmed(const std::string& s) {
  const size_t first = s.find_first_not_of(" \t\r\n"), last = s.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}

// Splits at commas outside of brackets.
std::vector<std::string> split_operands(const std::string& s) {
  std::vector<std::string> found;
  int depth = 0;
  std::string now;
  for (const char ch : s + ",") {
    if (ch == '[' || ch == '{' || ch == '(') ++depth;
    if (ch == ']' || ch == '}' || ch == ')') --depth;
    if (ch == ',' && depth == 0) {
      if (!trimmed(now).empty()) found.push_back(trimmed(now));
      now.clear();
    } else {
      now += ch;
    }
  }
  return found;
}

void Parser::fail(const std::string& what) const { throw std::runtime_error("ptx: " + what + " in " + f.name); }

Operand Parser::constant(u64 value, bool wide) {
  const auto found = constants.find({wide, value});
  Operand o;
  o.bank = wide ? Bank::kConstant64 : Bank::kConstant32;
  if (found != constants.end()) {
    o.index = found->second;
    return o;
  }
  o.index = static_cast<int>((wide ? f.constants64.size() : f.constants32.size()) / kWarp);
  if (wide) {
    f.constants64.insert(f.constants64.end(), kWarp, value);
  } else {
    f.constants32.insert(f.constants32.end(), kWarp, static_cast<u32>(value));
  }
  constants[{wide, value}] = o.index;
  return o;
}

bool Parser::find_register(const std::string& s, Operand* found) const {
  auto registers = banks.find(s);  // declared by its whole name
  int number = 0;
  if (registers == banks.end()) {
    const size_t digits = s.find_last_not_of("0123456789") + 1;
    if (digits == s.size()) return false;
    registers = banks.find(s.substr(0, digits));
    if (registers == banks.end()) return false;
    number = std::atoi(s.c_str() + digits);
  }
  found->bank = registers->second.bank;
  found->half = registers->second.half;
  found->index = registers->second.first + number;
  return true;
}

Operand Parser::operand(const std::string& s, bool wide) {
  Operand o;
  if (s == "_") {
    o.bank = Bank::kSink;
    return o;
  }
  if (s[0] == '!') {
    o = operand(s.substr(1), false);
    o.negated = true;
    return o;
  }
  if (find_register(s, &o)) return o;
  if (begins(s, "0f") || begins(s, "0F")) return constant(std::strtoull(s.c_str() + 2, nullptr, 16), false);
  if (begins(s, "0d") || begins(s, "0D")) return constant(std::strtoull(s.c_str() + 2, nullptr, 16), true);
  if (std::isdigit(static_cast<unsigned char>(s[0])) || s[0] == '-') {
    const u64 value =
        s[0] == '-' ? static_cast<u64>(std::strtoll(s.c_str(), nullptr, 0)) : std::strtoull(s.c_str(), nullptr, 0);
    return constant(wide ? value : value & 0xffffffffu, wide);
  }
  if (const auto symbol = symbols.find(s); symbol != symbols.end()) return constant(symbol->second, wide);
  if (const auto parameter = parameters.find(s); parameter != parameters.end())
    return constant(kFrameParameters + static_cast<u64>(parameter->second.offset), wide);
  const std::vector<std::string>& dynamic = f.module->dynamic_shared;
  if (std::count(dynamic.begin(), dynamic.end(), s) == 0) fail("unknown operand '" + s + "'");
  f.uses_dynamic_shared = true;
  o = constant(~0ull - 1, wide);  // known when all static memory is
  dynamic_addresses.push_back(o);
  return o;
}

Operand Parser::address(const std::string& s, i64* offset) {
  if (s[0] != '[') fail("not an address: " + s);
  const std::string in = s.substr(1, s.size() - 2);
  const size_t plus = in.find('+');
  *offset = plus == std::string::npos ? 0 : std::strtoll(in.c_str() + plus + 1, nullptr, 0);
  return operand(trimmed(in.substr(0, plus)), true);
}

int Parser::add_call(const std::string& result, const std::string& callee, const std::vector<std::string>& arguments) {
  Call call;
  if (!result.empty()) call.result = parameters.at(result);
  for (const std::string& name : arguments) call.arguments.push_back(parameters.at(name));
  const auto number = static_cast<int>(f.calls.size());
  callees[number] = callee;
  f.calls.push_back(call);
  return number;
}

// "(.param .b32 result) name (.param .u64 first, ...) .maxntid 128, 1, 1"
void Parser::head() {
  std::string rest = trimmed(f.module->text.substr(f.begin, f.module->text.find('{', f.begin) - f.begin)), name;
  int kernel_bytes = 0;
  if (rest[0] == '(') {
    const size_t close = rest.find(')');
    f.result = place(trimmed(rest.substr(1, close - 1)).substr(6), &name, &f.parameter_bytes);
    parameters[name] = f.result;
    rest = rest.substr(close + 1);
  }
  if (const size_t threads = rest.find(".maxntid"); threads != std::string::npos)
    f.threads = std::atoi(rest.c_str() + threads + 8);
  const size_t open = rest.find('('), close = rest.rfind(')');
  if (open == std::string::npos) return;
  for (const std::string& each : split_operands(rest.substr(open + 1, close - open - 1))) {
    if (!begins(each, ".param")) fail("unknown parameter: " + each);
    f.parameters.push_back(place(each.substr(6), &name, f.is_kernel ? &kernel_bytes : &f.parameter_bytes));
    if (f.is_kernel) {
      symbols[name] = static_cast<u64>(f.parameters.back().offset);
    } else {
      parameters[name] = f.parameters.back();
    }
  }
}

void Parser::declaration(const std::string& s) {
  const size_t space = s.find_first_of(" \t");
  const std::string kind = s.substr(0, space), rest = trimmed(s.substr(space));
  std::string name;
  if (kind == ".reg") {
    const std::string type = rest.substr(0, rest.find_first_of(" \t"));
    Registers made;
    if (type == ".pred") made.bank = Bank::kPredicate;
    if (type != ".pred" && bytes_of(type) == 8) made.bank = Bank::kBits64;
    made.half = type != ".pred" && bytes_of(type) == 2;
    int& count = made.bank == Bank::kPredicate ? f.predicates : made.bank == Bank::kBits64 ? f.count64 : f.count32;
    for (const std::string& each : split_operands(rest.substr(type.size()))) {
      made.first = count;
      const size_t open = each.find('<');
      count += open == std::string::npos ? 1 : std::atoi(each.c_str() + open + 1);
      banks[each.substr(0, open)] = made;
    }
  } else if (kind == ".param") {
    const Variable placed = place(rest, &name, &f.parameter_bytes);
    parameters[name] = placed;
  } else if (kind == ".shared") {
    const Variable placed = place(rest, &name, &f.static_shared);
    symbols[name] = kSharedBase + static_cast<u64>(placed.offset);
  } else if (kind == ".local") {
    const Variable placed = place(rest, &name, &f.local_bytes);
    symbols[name] = static_cast<u64>(placed.offset);
  } else if (kind != ".pragma" && kind != ".loc" && kind != ".file") {
    fail("unknown directive: " + s);
  }
}

void Parser::statement(const std::string& text, int line) {
  std::string s = trimmed(text);
  if (s.empty()) return;
  if (s[0] == '.') return declaration(s);
  Instruction i;
  i.line = line;
  i.text = s;
  std::replace_if(i.text.begin(), i.text.end(), [](char ch) { return ch == '\t' || ch == '\n'; }, ' ');
  if (s[0] == '@') {
    const size_t end = s.find_first_of(" \t");
    i.guard_negated = s[1] == '!';
    i.guard = operand(s.substr(1 + i.guard_negated, end - 1 - i.guard_negated), false).index;
    s = trimmed(s.substr(end));
  }
  const size_t end = std::min(s.find_first_of(" \t\n"), s.size());
  std::vector<std::string> op;
  std::stringstream parts(s.substr(0, end));
  for (std::string part; std::getline(parts, part, '.');) op.push_back(part);
  decode(i, op, split_operands(s.substr(end)));
  f.code.push_back(i);
}

void Parser::body(size_t open) {
  const std::string& text = f.module->text;
  int depth = 1, line = f.first_line + lines(text, f.begin, open), begun = line;
  std::string now;
  for (size_t at = open + 1; depth > 0; ++at) {
    const char ch = text[at];
    const bool is_blank = trimmed(now).empty();
    if (is_blank) begun = line;
    line += ch == '\n';
    if (ch == ';') {
      statement(now, begun);
      now.clear();
    } else if (is_blank && (ch == '{' || ch == '}')) {
      depth += ch == '{' ? 1 : -1;
    } else if (ch == ':' && text[at + 1] != ':' && trimmed(now).find_first_of(" \t\"") == std::string::npos) {
      labels[trimmed(now)] = static_cast<int>(f.code.size());
      now.clear();
    } else {
      now += ch;
    }
  }
}

void Parser::parse() {
  if (f.is_parsed) return;
  head();
  body(f.module->text.find('{', f.begin));
  for (const auto& [at, label] : jumps) {
    if (labels.count(label) == 0) fail("no label " + label);
    f.code[static_cast<size_t>(at)].target = labels[label];
  }
  const u64 dynamic = kSharedBase + static_cast<u64>(f.dynamic_offset());
  for (const Operand& o : dynamic_addresses) {
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto at = static_cast<size_t>(o.index * kWarp + lane);
      if (o.wide()) {
        f.constants64[at] = dynamic;
      } else {
        f.constants32[at] = static_cast<u32>(dynamic);
      }
    }
  }
  for (const auto& [number, name] : callees) {
    const auto callee = f.module->functions.find(name);
    if (callee == f.module->functions.end()) fail("no function " + name);
    Parser(callee->second).parse();
    f.calls[static_cast<size_t>(number)].function = &callee->second;
  }
  f.is_parsed = true;
}

void load(const std::vector<std::string>& texts) {
  modules.clear();
  for (const std::string& text : texts) {
    modules.push_back(std::make_unique<Module>());
    modules.back()->text = without_comments(text);
    find_functions(*modules.back());
  }
}

Function* find_kernel(const std::string& name) {
  for (const auto& module : modules) {
    const auto found = module->functions.find(name);
    if (found == module->functions.end() || !found->second.is_kernel) continue;
    Parser(found->second).parse();
    return &found->second;
  }
  return nullptr;
}

}  // namespace ptx
