// Python's door to the attention of a decoding step: one object for a step, whose sequences are checked once and not once a layer.
#include <algorithm>
#include <vector>

#include "../include/treadle/kernels/decode.hpp"
#include "heads.hpp"

namespace py = pybind11;
namespace tk = treadle::kernels;

namespace {

class DecodeStep {
public:
    DecodeStep(const py::sequence& caches, const py::object& lengths, const py::object& rows, int64_t heads) {
        require(is_exact<int64_t>(lengths) && is_exact<int64_t>(rows), "lengths, rows");
        const py::array counts = given(lengths), places = given(rows);
        require(has_shape(counts, {static_cast<py::ssize_t>(caches.size())}) && has_shape(places, {counts.size()}), "lengths, rows");
        rows_.assign(static_cast<const int64_t*>(places.data()), static_cast<const int64_t*>(places.data()) + places.size());
        require(!rows_.empty(), "caches");
        for (const py::handle cache : caches) {
            require(is_array(cache, 'f', 4, true), "caches");
            auto array = py::reinterpret_borrow<py::array>(cache);
            require(array.ndim() == 5 && array.shape(1) == 2, "caches");
            if (caches_.empty()) {
                layers_ = array.shape(0);
                shape_ = {heads, array.shape(2), array.shape(4)};
                require(shape_.kv_heads >= 1 && shape_.head_dim >= 1 && heads >= 1 && heads % shape_.kv_heads == 0, "heads");
            }
            const int64_t capacity = array.shape(3), length = static_cast<const int64_t*>(counts.data())[caches_.size()];
            require(has_shape(array, {layers_, 2, shape_.kv_heads, capacity, shape_.head_dim}), "caches");
            require(0 <= length && length < capacity, "lengths");
            sequences_.push_back({static_cast<float*>(array.mutable_data()), capacity, length});
            space_ = std::max(space_, tk::decode_space(shape_, length));
            caches_.push_back(std::move(array));
        }
        tokens_ = 1 + *std::max_element(rows_.begin(), rows_.end());
        require(*std::min_element(rows_.begin(), rows_.end()) >= 0, "rows");
    }

    int64_t attend(int64_t layer, const py::object& queries_object, const py::object& key_values_object, const py::object& a_object,
                   const py::object& log_z_object) const {
        const auto queries = heads_of_tokens(queries_object, shape_.heads, shape_.head_dim);
        if (!queries || queries->tokens < tokens_ || layer < 0 || layer >= layers_) return REFUSED;
        if (!is_array(key_values_object, 'f', 4) || !is_array(a_object, 'f', 4, true) || !is_array(log_z_object, 'f', 4, true)) return REFUSED;
        const py::array key_values = given(key_values_object);
        py::array a = given(a_object), log_z = given(log_z_object);
        if (!has_shape(key_values, {queries->tokens, 2, shape_.kv_heads, shape_.head_dim})) return REFUSED;
        if (!has_shape(a, {queries->tokens, shape_.heads, shape_.head_dim}) || !has_shape(log_z, {queries->tokens, shape_.heads})) return REFUSED;
        const auto* const appended = static_cast<const float*>(key_values.data());
        auto* const out = static_cast<float*>(a.mutable_data());
        auto* const out_log_z = static_cast<float*>(log_z.mutable_data());
        const int64_t width = shape_.heads * shape_.head_dim, kv_width = 2 * shape_.kv_heads * shape_.head_dim;
        const py::gil_scoped_release released;
        std::vector<float> space(static_cast<size_t>(space_));
        for (size_t i = 0; i < rows_.size(); ++i) {
            tk::SequenceView sequence = sequences_[i];
            sequence.keys_values += layer * kv_width * sequence.capacity;
            const int64_t row = rows_[i];
            tk::decode(shape_, sequence, queries->numbers + row * queries->stride, appended + row * kv_width, space.data(), out + row * width,
                       out_log_z + row * shape_.heads);
        }
        return DONE;
    }

private:
    std::vector<py::array> caches_;  // held: the views point into them
    std::vector<tk::SequenceView> sequences_;
    std::vector<int64_t> rows_;
    tk::HeadsShape shape_{};
    int64_t layers_ = 0, tokens_ = 0, space_ = 0;
};

int64_t attend_keys(const py::object& queries_object, const py::object& rows, const py::object& keys_object, const py::object& values_object,
                    const py::object& biases_object, const py::object& a_object, const py::object& log_z_object) {
    if (!is_array(keys_object, 'f', 4) || !is_array(values_object, 'f', 4) || !is_array(biases_object, 'f', 4)) return REFUSED;
    if (!is_array(a_object, 'f', 4, true) || !is_array(log_z_object, 'f', 4, true)) return REFUSED;
    const py::array keys = given(keys_object), values = given(values_object), biases = given(biases_object);
    py::array a = given(a_object), log_z = given(log_z_object);
    if (keys.ndim() != 3 || a.ndim() != 3 || keys.size() == 0) return REFUSED;
    const int64_t count = keys.shape(1);
    const tk::HeadsShape shape{a.shape(1), keys.shape(0), keys.shape(2)};
    if (shape.heads < 1 || shape.heads % shape.kv_heads != 0) return REFUSED;
    if (!has_shape(values, {shape.kv_heads, count, shape.head_dim}) || !has_shape(biases, {shape.kv_heads, count})) return REFUSED;
    const auto queries = heads_of_tokens(queries_object, shape.heads, shape.head_dim);
    if (!queries) return REFUSED;
    const auto places = places_among(rows, queries->tokens);
    if (!places || !has_shape(a, {places->count, shape.heads, shape.head_dim}) || !has_shape(log_z, {places->count, shape.heads})) return REFUSED;
    const tk::KeysView seen{static_cast<const float*>(keys.data()), static_cast<const float*>(values.data()), static_cast<const float*>(biases.data()), count};
    auto* const out = static_cast<float*>(a.mutable_data());
    auto* const out_log_z = static_cast<float*>(log_z.mutable_data());
    const py::gil_scoped_release released;
    std::vector<float> space(static_cast<size_t>(tk::decode_space(shape, count)));
    for (int64_t i = 0; i < places->count; ++i) {
        const int64_t token = places->begin == nullptr ? i : places->begin[i];
        tk::attend_keys(shape, seen, queries->numbers + token * queries->stride, space.data(), out + i * shape.heads * shape.head_dim,
                        out_log_z + i * shape.heads);
    }
    return DONE;
}

}  // namespace

void bind_decode(py::module_& module) {
    py::class_<DecodeStep>(module, "DecodeStep")
        .def(py::init<const py::sequence&, const py::object&, const py::object&, int64_t>())
        .def("attend", &DecodeStep::attend, py::arg("layer"), py::arg("queries"), py::arg("key_values"), py::arg("a"), py::arg("log_z"));
    module.def("attend_keys", &attend_keys, py::arg("queries"), py::arg("rows"), py::arg("keys"), py::arg("values"), py::arg("biases"),
               py::arg("a"), py::arg("log_z"));
}
