// Named choices of an enumeration.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace bapo {

// The choice of this name. Throws std::invalid_argument, which lists the allowed names.
template <typename T>
T parse_choice(const char* argument, const std::string& value,
               std::initializer_list<std::pair<const char*, T>> choices) {
  std::string allowed;
  for (const auto& [name, choice] : choices) {
    if (value == name) return choice;
    allowed += (allowed.empty() ? "" : " or ") + std::string(name);
  }
  throw std::invalid_argument(std::string(argument) + " must be " + allowed + ", got '" + value +
                              "'");
}

}  // namespace bapo
