// nlohmann/json.hpp: declarations only. torch's ATen/functorch/Interpreter.h includes this header, which torch's wheels do not
// ship, and uses these members in inline functions that we never call. No code of that library is here.
#pragma once
#include <string>

namespace nlohmann {

struct json {
  template <typename T>
  json(const T& value);  // NOLINT: torch converts implicitly
  template <typename T>
  T get() const;
  std::string dump() const;
  static json parse(const std::string& text);
};

}  // namespace nlohmann
